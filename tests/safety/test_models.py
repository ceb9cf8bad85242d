"""Malicious model directories, for every command and role: none runs code, prompts for it, or takes unbounded time."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from embedtrain.config.recipe import LoraConfig, Pooling
from embedtrain.data.tokens import FastTokenizer
from embedtrain.errors import ModelError
from embedtrain.formats import chat_template
from embedtrain.formats.peft import read_settings
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import read_tokenizer
from embedtrain.models import adapters
from embedtrain.models.build import build_encoder, full_state_dict
from embedtrain.models.stored_weights import read_pickled_tensors, stored_tensors
from tests.mine.models import save_cross_encoder
from tests.safety.payloads import MARKER, attempt, deep, edit, plant_module, plant_pickle
from tests.small import model_options, save_guide, small_model, write_rows
from tests.token_rerankers import chat_tokenizer

Attack = Callable[[Path, Path], None]  # changes a model directory so that its code would create the marker


def module_type(directory: Path, _: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    modules[0]["type"] = "evil.Mod"
    (directory / "modules.json").write_text(json.dumps(modules))


def second_modules(directory: Path, _: Path) -> None:
    (directory / "inner").mkdir()
    modules = json.loads((directory / "modules.json").read_text())
    modules[0]["path"] = "inner"
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "inner" / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "evil.Mod"}]')


def own_classes(directory: Path, _: Path) -> None:
    edit(
        directory / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    )


def own_tokenizer(directory: Path, _: Path) -> None:
    edit(
        directory / "tokenizer_config.json", tokenizer_class="Tok", auto_map={"AutoTokenizer": ["evil.Tok", "evil.Tok"]}
    )


def no_tokenizer(name: str) -> Attack:
    """A transformers class that is not a tokenizer and prompts whether the model's code may run."""

    def attack(directory: Path, _: Path) -> None:
        edit(directory / "config.json", auto_map={name: "evil.Mod"})
        edit(directory / "tokenizer_config.json", tokenizer_class=name)

    return attack


def pickled_weights(directory: Path, marker: Path) -> None:
    plant_pickle(directory / "pytorch_model.bin", marker, load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").unlink()


def unused_pickles(directory: Path, marker: Path) -> None:
    """They are not read if there are safetensors."""
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.pkl", "vocab.pickle"):
        plant_pickle(directory / name, marker)


def pickled_head(directory: Path, marker: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (directory / "modules.json").write_text(json.dumps([*modules[:2], dense]))
    (directory / "2_Dense").mkdir(exist_ok=True)
    edit(directory / "2_Dense" / "config.json", in_features=32, out_features=16)
    plant_pickle(directory / "2_Dense" / "pytorch_model.bin", marker)


def unpickling_arguments(directory: Path, marker: Path) -> None:
    arguments = {"weights_only": False, "use_safetensors": False, "trust_remote_code": True}
    edit(directory / "sentence_bert_config.json", model_args=arguments)
    pickled_weights(directory, marker)


def kernel(directory: Path, _: Path) -> None:
    edit(directory / "config.json", attn_implementation="evil/kernel")


def adapter(directory: Path, _: Path) -> None:
    mapping = {"base_model_class": "Mod", "parent_library": "evil"}
    edit(directory / "adapter_config.json", peft_type="LORA", base_model_name_or_path="evil/base", auto_mapping=mapping)


def head_activation(directory: Path, marker: Path) -> None:
    pickled_head(directory, marker)
    edit(directory / "2_Dense" / "config.json", activation_function="evil.Mod")


def index_elsewhere(directory: Path, _: Path) -> None:
    edit(directory / "model.safetensors.index.json", weight_map={"a": "../../secret.safetensors"})


def config(**changes: object) -> Attack:
    return lambda directory, _: edit(directory / "config.json", **changes)


def text(name: str, content: str) -> Attack:
    return lambda directory, _: (directory / name).write_text(content) and None


def huge_header(directory: Path, _: Path) -> None:
    (directory / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


# Attacks and a part of the error message; "" if the change is in a file that is not used.
ATTACKS: dict[str, tuple[Attack, str]] = {
    "module type": (module_type, "evil.Mod"),
    "a second modules.json": (second_modules, "second"),
    "classes of its own": (own_classes, "auto_map"),
    "a tokenizer of its own": (own_tokenizer, ""),
    "a config as tokenizer": (no_tokenizer("AutoConfig"), "tokenizer_class=AutoConfig"),
    "a model as tokenizer": (no_tokenizer("AutoModelForImageTextToText"), "tokenizer_class="),
    "a model as fast tokenizer": (no_tokenizer("AutoModelForImageTextToTextFast"), "tokenizer_class="),
    "a retriever as tokenizer": (no_tokenizer("RagRetriever"), "tokenizer_class=RagRetriever"),
    "a list as tokenizer": (lambda d, _: edit(d / "tokenizer_config.json", tokenizer_class=["x"]), "tokenizer_class="),
    "pickled weights": (pickled_weights, "pickle"),
    "unused pickles": (unused_pickles, ""),
    "pickled head": (pickled_head, "a pickle with more than tensors"),
    "unpickling arguments": (unpickling_arguments, "use_safetensors"),
    "kernel": (kernel, "attn_implementation=evil/kernel"),
    "adapter": (adapter, "adapter_config.json"),
    "activation of a head": (head_activation, "activation evil.Mod"),
    "index elsewhere": (index_elsewhere, "../../secret.safetensors"),
    "activation of layers": (config(hidden_act="os.system"), "cannot build a model"),
    "huge layers": (config(hidden_size=10**18), "cannot build a model"),
    "many layers": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "many words": (config(vocab_size=10**7), "parameters"),
    "no heads": (config(num_attention_heads=0), "cannot build a model"),
    "odd type": (config(dtype="os"), "cannot read a model configuration"),
    "type in a list": (config(model_type=["bert"]), "cannot read a model configuration"),
    "a list": (text("config.json", "[1]"), "dict"),
    "deep config": (text("config.json", deep("[", "]")), "recursion"),
    "long number": (text("config.json", f'{{"hidden_size": {"9" * 5000}}}'), "4300 digits"),
    "deep modules": (text("modules.json", deep("[", "]")), "recursion"),
    "deep settings": (text("sentence_bert_config.json", deep('{"a":', "}").replace(":}", ":1}")), "recursion"),
    "deep tokenizer": (text("tokenizer.json", deep("[", "]")), "recursion"),
    "deep index": (text("model.safetensors.index.json", f'{{"weight_map": {deep("[", "]")}}}'), "recursion"),
    "huge header": (huge_header, "header too large"),
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("safety")
    save_guide(small_model("bert"), folder)
    save_cross_encoder(folder / "cross")
    write_rows(folder / "train.jsonl", 8)
    (folder / "corpus.jsonl").write_text('{"_id": "1", "text": "alpha beta"}\n{"_id": "2", "text": "gamma"}\n')
    (folder / "pairs.tsv").write_text("sentence1\tsentence2\tscore\nalpha\tbeta\t1\ngamma\tdelta\t2\n")
    plant_module(folder, folder / MARKER)  # importable if Python is started in this folder
    return folder


def attacked(workshop: Path, attack: Attack, model: str = "guide") -> Path:
    """A copy of a model after the attack; the files of earlier attacks are removed."""
    directory = workshop / "model"
    for name in ("model", "run", "mined"):
        shutil.rmtree(workshop / name, ignore_errors=True)
    shutil.copytree(workshop / model, directory)
    plant_module(directory, workshop / MARKER)
    attack(directory, workshop / MARKER)
    return directory


@pytest.fixture
def run_command(ranks, workshop):
    """Runs a command; foreign code must not run, and there must be no prompt."""

    def run(command: str, *arguments: str) -> tuple[str, str]:
        (outcome,) = ranks(1, attempt, command, workshop, arguments)
        assert not outcome.ran
        assert "[y/N]" not in outcome.printed
        assert "\n" not in outcome.message
        return outcome.message, outcome.kind

    return run


def test_marker_is_created_by_code_that_runs(ranks, workshop):
    """Otherwise no test below could fail: the same files, with trust_remote_code=true."""
    attacked(workshop, own_classes)
    (outcome,) = ranks(1, attempt, "search", workshop, ["model=model", "corpus=corpus.jsonl", "trust_remote_code=true"])
    assert outcome.ran


@pytest.mark.parametrize("name", ATTACKS)
def test_model_directory(run_command, workshop, name):
    attack, part = ATTACKS[name]
    attacked(workshop, attack)
    message, kind = run_command("search", "model=model", "corpus=corpus.jsonl", "query=alpha")
    assert (part in message) if part else not message
    assert kind == ("ModelError" if part else "")


TRAIN = ["name=t", "data.train=[train.jsonl]", "train.steps=1", "train.global_batch_size=4", "output_dir=run"]
# Each role of a model, with the command and its options.
ROLES: dict[str, tuple[str, list[str]]] = {
    "trained": ("train", [*TRAIN, "model.path=model"]),
    "guide": ("train", [*TRAIN, "model.path=guide", "loss.guide=model"]),
    "teacher of a loss": ("train", [*TRAIN, "model.path=guide", "loss=distill_embeddings", "loss.teacher=model"]),
    "tokenizer": ("train", [*TRAIN, "model.path=guide", "model.tokenizer=model"]),
    "evaluated": ("evaluate", ["model=model", "sets=[pairs.tsv]", "output_dir=metrics"]),
    "miner": ("mine", ["model=model", "data=[train.jsonl]", "output_dir=mined"]),
    "teacher": ("mine", ["model=guide", "data=[train.jsonl]", "output_dir=mined", "teacher=model"]),
    "inspected": ("inspect", ["data=train.jsonl", "model=model"]),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["classes of its own", "a config as tokenizer", "unpickling arguments"])
def test_model_in_every_role(run_command, workshop, role, name):
    attacked(workshop, ATTACKS[name][0])
    command, arguments = ROLES[role]
    message, kind = run_command(command, *arguments)
    if role == "tokenizer" and name == "classes of its own":  # only the tokenizer of this directory is read
        assert kind == ""
    else:
        assert kind in ("ModelError", "ConfigError")
        assert message


def cross_encoder_modules(directory: Path, _: Path) -> None:
    edit(directory / "config_sentence_transformers.json", model_type="CrossEncoder")
    (directory / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "evil.Mod"}]')


def cross_encoder_pickle(directory: Path, marker: Path) -> None:
    edit(directory / "config_sentence_transformers.json", model_type="CrossEncoder")
    module = '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]'
    (directory / "modules.json").write_text(module)
    unpickling_arguments(directory, marker)


CROSS_ENCODERS: dict[str, tuple[Attack, str]] = {
    "module type": (cross_encoder_modules, "evil.Mod"),
    "unpickling": (cross_encoder_pickle, "use_safetensors"),
    "pickle": (pickled_weights, "pickle"),
    # Scores are raw: the function that sentence-transformers would call is not.
    "activation": (config(sentence_transformers={"activation_fn": "evil.Mod"}), ""),
    "function of torch": (config(sentence_transformers={"activation_fn": "torch.utils.collect_env.main"}), ""),
    "older name": (config(sbert_ce_default_activation_function="evil.Mod"), ""),
    "own classes": (own_classes, "auto_map"),
    "own head": (config(auto_map={"AutoModelForSequenceClassification": "evil.Model"}), ""),
    "kernel": (kernel, "evil/kernel"),
    "deep": (text("config_sentence_transformers.json", deep("[", "]")), ""),
}


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_cross_encoder_as_teacher(run_command, workshop, name):
    attack, part = CROSS_ENCODERS[name]
    attacked(workshop, attack, "cross")
    message, kind = run_command(
        "mine", "model=guide", "data=[train.jsonl]", "output_dir=mined", "teacher=model", "precision=fp32"
    )
    assert part in message
    assert kind in (("ModelError", "ConfigError") if message else ("",))


NUMBERS = [
    ("config.json", "num_hidden_layers", 10**8),  # the others make a list of as many entries before a weight is read
    ("config.json", "num_hidden_layers", -1),
    ("config.json", "num_attention_heads", 10**9),
    ("config.json", "num_labels", 10**9),
    ("config.json", "max_position_embeddings", 10**12),
    ("tokenizer_config.json", "extra_ids", 10**9),
    ("tokenizer_config.json", "added_tokens_decoder", {"1000000000000": {"content": "x"}}),
    ("added_tokens.json", "x", 10**12),
]


@pytest.mark.parametrize(("file", "key", "number"), NUMBERS)
def test_numbers_are_bounded(tmp_path, file, key, number):
    edit(tmp_path / "config.json", model_type="qwen3", hidden_size=32)
    edit(tmp_path / file, **{key: number})
    with pytest.raises(ModelError, match=f"{file}.*{key}"):
        open_model_source(model_options(path=str(tmp_path), pooling=Pooling.mean))
    if file == "config.json":
        with pytest.raises(ModelError, match=f"{file}.*{key}"):
            open_model_source(model_options(config=str(tmp_path / file), pooling=Pooling.mean))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.txt", "tokenizer.model"])
def test_files_are_bounded(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with pytest.raises(ModelError, match=rf"{name} has 1,099,511,627,776 bytes"):
        read_tokenizer(tmp_path, trust_remote_code=False)


def test_tokenizer_rules_are_bounded(tmp_path):
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    model = {"type": "WordPiece", "vocab": {"a": 0}}
    edit(tmp_path / "tokenizer.json", model=model, normalizer={"type": "Sequence", "normalizers": [replace] * 40})
    with pytest.raises(ModelError, match=r"tokenizer.json.*normalizer"):
        read_tokenizer(tmp_path, trust_remote_code=False)
    edit(tmp_path / "tokenizer.json", model=model | {"max_input_chars_per_word": 10**9}, normalizer=None)
    with pytest.raises(ModelError, match="max_input_chars_per_word=1000000000"):
        read_tokenizer(tmp_path, trust_remote_code=False)


def backtracking(text: str) -> Tokenizer:
    """A tokenizer with a regular expression that takes exponential time for a text."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(f"({text}+)+$"), "isolated")
    return tokenizer


def test_regular_expression_of_a_tokenizer(tmp_path):
    backtracking("a").save(str(tmp_path / "tokenizer.json"))
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", unk_token="[UNK]")
    with pytest.raises(ModelError, match="retry-limit"):
        read_tokenizer(tmp_path, trust_remote_code=False)


def test_regular_expression_that_depends_on_the_text():
    tokenizer = FastTokenizer(PreTrainedTokenizerFast(tokenizer_object=backtracking("q"), unk_token="[UNK]"))
    assert tokenizer.ids(["a"], 8) == [[0]]
    with pytest.raises(ModelError, match="retry-limit"):
        tokenizer.ids(["q" * 100 + "!"], 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", "(a+)+$"),
        ("exclude_modules", ".*" * 20),
        ("rank_pattern", {"a?" * 30 + "a" * 30: 4}),
        ("layers_pattern", ["(?:a|a)*$"]),
        ("alpha_pattern", {f"layer.{number}.query": 4 for number in range(2000)}),
    ],
)
def test_regular_expression_of_an_adapter(tmp_path, key, value):
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["query"]}
    edit(tmp_path / "adapter_config.json", **settings | {key: value})
    with pytest.raises(ModelError, match=key):
        read_settings(tmp_path)
    edit(tmp_path / "adapter_config.json", **settings | {key: r".*\.(self_attn|mlp)\.(q_proj|v_proj)"})
    if key.endswith("modules"):
        read_settings(tmp_path)


F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HEADERS = {
    "2^60 bytes": ({"a": F32}, 2**60),
    "more than the file": ({"a": F32}, 10**6),
    "overlapping tensors": ({"a": F32, "b": F32}, None),
    "2^40 elements": ({"a": F32 | {"shape": [2**40]}}, None),
    "2^64 elements": ({"a": F32 | {"shape": [2**32, 2**32]}}, None),
    "beyond the file": ({"a": F32 | {"shape": [2**40], "data_offsets": [0, 2**42]}}, None),
    "negative": ({"a": F32 | {"shape": [-4]}}, None),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(tmp_path, name):
    header, length = HEADERS[name]
    content = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes((length or len(content)).to_bytes(8, "little") + content + bytes(16))
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        stored_tensors(tmp_path)


def saved(folder: Path, tensor: torch.Tensor, compression: int | None = None) -> Path:
    """A `colbert_linear.pt` with this weight; `compression` is zipfile's."""
    path = folder / "colbert_linear.pt"
    torch.save({"weight": tensor, "bias": torch.zeros(1)}, path)
    if compression is not None:
        with zipfile.ZipFile(path) as file:
            parts = {info.filename: file.read(info) for info in file.infolist()}
        with zipfile.ZipFile(path, "w", compression) as file:
            for name, content in parts.items():
                file.writestr(name, content)
    return path


# The weight, and a part of the message.
PICKLED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.zeros(1, 32, device="meta"), "must be a plain tensor"),
    "float8": (lambda: torch.zeros(1, 32).to(torch.float8_e4m3fn), "must be a plain tensor"),
    "integers": (lambda: torch.zeros(1, 32, dtype=torch.int64), "must be a plain tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "colbert_linear.pt"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "colbert_linear.pt",
    ),
    "sparse": (lambda: torch.eye(4).to_sparse(), "must be a plain tensor"),
    "a terabyte of one number": (lambda: torch.zeros(1, 1).expand(10**10, 32), "fewer numbers are stored"),
}


@pytest.mark.parametrize("name", PICKLED)
def test_tensors_of_pickles(tmp_path, name):
    tensor, part = PICKLED[name]
    with pytest.raises(ModelError, match=part) as raised:
        read_pickled_tensors(saved(tmp_path, tensor()))
    assert "\n" not in str(raised.value)


def test_compressed_pickles_are_not_inflated(tmp_path):
    plain = saved(tmp_path, torch.ones(2, 32), zipfile.ZIP_STORED)
    assert read_pickled_tensors(plain)["weight"].shape == (2, 32)
    bomb = saved(tmp_path, torch.zeros(1 << 20, 32), zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(ModelError, match=r"colbert_linear.pt is compressed, to 134,\d+,\d+ bytes"):
        read_pickled_tensors(bomb)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", {f".*.*.*.*.*.*x{number}": 4 for number in range(900)}),
        ("alpha_pattern", {".*": 4, f"{'(.|.)' * 30}!": 4}),  # without repetitions
        ("target_modules", "(.|.)" * 30 + "!"),
    ],
)
def test_regular_expressions_that_need_long_for_names_of_layers(tmp_path, monkeypatch, key, value):
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["query"]}
    edit(tmp_path / "adapter_config.json", **settings | {key: value})
    monkeypatch.setattr(adapters, "_PATTERN_SECONDS", 0.5)
    model = save_guide(small_model("bert"), tmp_path)
    with torch.device("meta"):
        encoder = build_encoder(open_model_source(model_options(path=str(model))))
    with pytest.raises(ModelError, match=rf"adapter_config.json: .*{key}.* needs more than 0.5 s"):
        adapters.add_adapters(encoder, LoraConfig(path=str(tmp_path)), read_settings(tmp_path), torch.float32)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "loops": (NESTED, "needs more than 1 s"),
    "loops for one text": ("{% if messages[0].content == 'Is it?' %}" + NESTED + "{% endif %}", "needs more than 1 s"),
    "a long string": ("{{ 'x' * 5000000000 }}", "needs more than 1.0 GiB of memory"),
    "doubling": ("{% set n = namespace(x='x') %}" + "{% set n.x = n.x ~ n.x %}" * 20 + "{{ n.x }}", "1,048,576 char"),
    "a wide field": ("{{ '%999999d' % 1 }}", "999,999 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "code": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_are_bounded(monkeypatch, name):
    template, part = TEMPLATES[name]
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 1 if "loops" in name else 10)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=rf"model: .*{part}") as raised:
        chat_template.read_chat_template(tokenizer, "model")
    assert "\n" not in str(raised.value)


def test_a_tensor_larger_than_the_model_is_not_read(tmp_path):
    """4 GiB that take no space on the disk, as the table of a model with 32 dimensions."""
    model = save_guide(small_model("bert"), tmp_path)
    tensors, path = load_file(model / "model.safetensors"), model / "model.safetensors"
    (name,) = (key for key in tensors if "word_embeddings" in key)
    before = tensors.pop(name).shape
    content = save(tensors)
    length = int.from_bytes(content[:8], "little")
    header, start = json.loads(content[8 : 8 + length]), len(content) - 8 - length
    header[name] = {"dtype": "F32", "shape": [1 << 25, before[1]], "data_offsets": [start, start + (4 << 30)]}
    written = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written + content[8 + length :])
        file.truncate(8 + len(written) + start + (4 << 30))
    source = open_model_source(model_options(path=str(model)))
    with pytest.raises(ModelError, match=rf"model.safetensors: {name} has 1,073,741,824 numbers"):
        full_state_dict(source, seed=0)
