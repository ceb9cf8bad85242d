"""Model directories are read, or rejected with one sentence; their code is never run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st
from transformers import T5Config

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError, EmbedtrainError, ModelError
from embedtrain.formats.sentence_transformers import DENSE_KEYS, NORMALIZE_KEYS, POOLING_KEYS
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import check_vocabulary, load_tokenizer, resolve_max_length
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict, locate_weights
from embedtrain.models.stored_weights import stored_dtype
from tests.small import model_options, save_small, small_model

POOLINGS = {"cls": Pooling.cls, "mean": Pooling.mean, "lasttoken": Pooling.last, "max": Pooling.max}
POOLINGS |= {"weightedmean": Pooling.weighted_mean}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A Hugging Face directory of a small XLM-R."""
    return save_small(small_model("xlm-roberta"), tmp_path_factory.mktemp("plain"))


@pytest.fixture
def hf_dir(plain, tmp_path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture
def st_dir(plain, tmp_path) -> Path:
    """A directory saved by sentence-transformers: mean pooling, two heads, normalisation, prompts."""
    modules = [
        st.Transformer(str(plain), max_seq_length=24),
        st.Pooling(32, pooling_mode="mean"),
        st.Dense(32, 24, activation_function=torch.nn.Tanh()),
        st.Dense(24, 16, bias=False, activation_function=torch.nn.Identity()),
        st.Normalize(),
    ]
    model = SentenceTransformer(modules=modules, prompts={"query": "q: ", "document": "d: "}, device="cpu")
    model.save_pretrained(str(tmp_path / "st"))
    # Since version 6 the library writes the length into the tokenizer alone.
    rewrite(part(tmp_path / "st", "Transformer") / "sentence_bert_config.json", max_seq_length=24)
    return tmp_path / "st"


def opened(directory: Path, **options: Any):
    return open_model_source(model_options(path=str(directory), **options))


def rewrite(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def part(directory: Path, kind: str) -> Path:
    """The folder of a module in a sentence-transformers directory."""
    for module in json.loads((directory / "modules.json").read_text()):
        if module["type"].endswith(kind):
            return directory / module["path"]
    raise AssertionError(kind)


def set_modules(directory: Path, *kinds: str) -> None:
    known = {m["type"].rsplit(".", 1)[1]: m for m in json.loads((directory / "modules.json").read_text())}
    (directory / "modules.json").write_text(json.dumps([known.get(kind, {"type": kind, "path": ""}) for kind in kinds]))


def assert_raises(kind: type[EmbedtrainError], make: Any, *words: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_hugging_face_directory(hf_dir):
    assert_raises(ConfigError, lambda: opened(hf_dir), "model.pooling", str(hf_dir))
    source = opened(hf_dir, pooling=Pooling.cls, query_prompt="q: ")
    assert (source.vectors.pooling, source.vectors.normalize, source.tokenization.max_length, source.vectors.dense) == (
        Pooling.cls,
        True,
        None,
        (),
    )
    assert source.prompts == {"query": "q: "}
    assert opened(hf_dir, pooling=Pooling.cls, normalize=False).vectors.normalize is False
    assert source.config.use_cache is False


def test_sentence_transformers_directory(st_dir):
    source = opened(st_dir)
    assert (source.vectors.pooling, source.vectors.normalize) == (Pooling.mean, True)
    assert source.tokenization.max_length == 24
    assert (source.prompts["query"], source.prompts["document"]) == ("q: ", "d: ")
    heads = [(head.num_in, head.num_out, head.bias) for head in source.vectors.dense]
    assert heads == [(32, 24, True), (24, 16, False)]
    options = opened(st_dir, pooling=Pooling.cls, normalize=False, max_length=12, query_prompt="")
    assert (options.vectors.pooling, options.vectors.normalize) == (Pooling.cls, False)
    assert options.tokenization.max_length == 12
    assert options.prompts == source.prompts | {"query": ""}


def test_vectors_equal_sentence_transformers(st_dir):
    source = opened(st_dir)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    tokens = load_tokenizer(source)(["alpha beta", "gamma a b c d e"], padding=True, return_tensors="pt")
    reference = SentenceTransformer(str(st_dir), device="cpu")
    with torch.no_grad():
        actual = encoder.eval()(Chunk(tokens["input_ids"], tokens["attention_mask"]))[0]
    expected = reference.encode(["alpha beta", "gamma a b c d e"], convert_to_tensor=True)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", POOLINGS)
def test_old_and_new_pooling_settings(st_dir, mode):
    path = part(st_dir, "Pooling") / "config.json"
    flag = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}
    flag |= {"max": "pooling_mode_max_tokens", "weightedmean": "pooling_mode_weightedmean_tokens"}
    flags = dict.fromkeys(flag.values(), False)
    for content in (
        {"embedding_dimension": 32, "pooling_mode": mode},
        {"embedding_dimension": 32, "pooling_mode": [mode]},
        {"word_embedding_dimension": 32, **flags, flag[mode]: True},
    ):
        path.write_text(json.dumps(content))
        assert opened(st_dir).vectors.pooling is POOLINGS[mode]


@pytest.mark.parametrize(
    "content",
    [
        {"pooling_mode": "mean_sqrt_len_tokens"},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode_mean_sqrt_len_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "weightedmean", "include_prompt": False},
        {},
    ],
)
def test_unsupported_pooling(st_dir, content):
    path = part(st_dir, "Pooling") / "config.json"
    path.write_text(json.dumps(content))
    assert_raises(ModelError, lambda: opened(st_dir), str(path))


def test_optional_modules(st_dir):
    set_modules(st_dir, "Transformer", "Pooling")
    source = opened(st_dir)
    assert (source.vectors.normalize, source.vectors.dense) == (False, ())
    set_modules(st_dir, "Transformer")
    assert_raises(ConfigError, lambda: opened(st_dir), "no Pooling")
    assert opened(st_dir, pooling=Pooling.cls).vectors.pooling is Pooling.cls


@pytest.mark.parametrize(
    "kinds",
    [
        ["Pooling"],
        ["Pooling", "Transformer"],
        ["Transformer", "Pooling", "Pooling"],
        ["Transformer", "Dense", "Pooling"],
        ["Transformer", "Pooling", "Normalize", "Dense"],
        [],
    ],
)
def test_unsupported_order_of_modules(st_dir, kinds):
    """For example, normalising before the head gives different vectors."""
    set_modules(st_dir, *kinds)
    assert_raises(ModelError, lambda: opened(st_dir), "in this order")


@pytest.mark.parametrize(
    "kind", ["evil.Module", "sentence_transformers.models.LSTM", "os.system", "evil", "sentence_transformers.evil.Evil"]
)
@pytest.mark.parametrize("trust", [False, True])
def test_unknown_modules_are_rejected_and_never_imported(st_dir, tmp_path, monkeypatch, kind, trust):
    (st_dir / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Module: pass\n")
    monkeypatch.syspath_prepend(st_dir)
    set_modules(st_dir, "Transformer", "Pooling", kind)
    assert_raises(ModelError, lambda: opened(st_dir, trust_remote_code=trust), kind)
    assert not (tmp_path / "marker").exists()


def test_code_of_a_model_directory_is_not_run(hf_dir, tmp_path):
    (hf_dir / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    auto = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    rewrite(hf_dir / "config.json", model_type="evil", auto_map=auto)
    assert_raises(ModelError, lambda: opened(hf_dir, pooling=Pooling.cls), "auto_map")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("place", ["..", "../other", "/etc"])
def test_modules_outside_their_directory(st_dir, place):
    modules = json.loads((st_dir / "modules.json").read_text())
    modules[1]["path"] = place
    (st_dir / "modules.json").write_text(json.dumps(modules))
    assert_raises(ModelError, lambda: opened(st_dir), "outside its own directory")


@pytest.mark.parametrize("content", ["[{", "{}", "[3]", '[{"path": ""}]', '"Transformer"'])
def test_broken_modules_json(st_dir, content):
    (st_dir / "modules.json").write_text(content)
    assert_raises(ModelError, lambda: opened(st_dir), "modules.json")


def test_keys_of_modules_are_those_of_sentence_transformers():
    """A new key of a newer version has to be read, or found to be harmless."""
    for module, known in ((st.Pooling, POOLING_KEYS), (st.Dense, DENSE_KEYS), (st.Normalize, NORMALIZE_KEYS)):
        assert set(getattr(module, "config_keys", ())) <= known


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Pooling", {"pooling_weights": [1, 2]}, "pooling_weights=.* is not known"),
        ("Pooling", {"pooling_mode_first_last": True}, "pooling_mode_first_last=True is not known"),
        ("Dense", {"scale": 2}, "scale=2 is not known"),
        ("Dense", {"module_output_name": "other"}, "module_output_name='other' .* only sentence_embedding is"),
        ("Normalize", {"module_input_name": "token_embeddings"}, "only sentence_embedding is"),
    ],
)
def test_settings_of_modules_that_are_not_known_are_refused(st_dir, kind, changes, message):
    path = part(st_dir, kind) / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | {"a_new_switch": False}))
    opened(st_dir)
    rewrite(path, **changes)
    with pytest.raises(ModelError, match=message):
        opened(st_dir)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"model_type": "nothing"}', '{"model_type": "bert", "hidden_size": "a"}']
)
def test_broken_config_json(hf_dir, content):
    (hf_dir / "config.json").write_text(content)
    assert_raises(ModelError, lambda: opened(hf_dir, pooling=Pooling.cls), str(hf_dir))


def test_missing_files(st_dir, hf_dir, tmp_path):
    (part(st_dir, "Pooling") / "config.json").unlink()
    assert_raises(ModelError, lambda: opened(st_dir), "Pooling/config.json is missing")
    (hf_dir / "config.json").unlink()
    assert_raises(ModelError, lambda: opened(hf_dir, pooling=Pooling.cls), str(hf_dir))


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "evil.Activation"},
        {"use_residual": True},
        {"in_features": ...},
        {"out_features": "many"},
    ],
)
def test_unsupported_dense_heads(st_dir, changes):
    path = part(st_dir, "Dense") / "config.json"
    rewrite(path, **changes)
    assert_raises(ModelError, lambda: opened(st_dir), str(path))


def test_dense_heads_with_wrong_weights(st_dir):
    """A head whose weights are missing or have other names would stay random."""
    source, path = opened(st_dir), part(st_dir, "Dense") / "model.safetensors"
    shapes = {name: tensor.shape for name, tensor in build_encoder(source).state_dict().items()}
    assert locate_weights(source, shapes) is not None
    whole = load_file(path)
    for damaged in (
        {"linear.weight": whole["linear.weight"]},
        {"weight": whole["linear.weight"], "bias": whole["linear.bias"]},
        whole | {"linear.weight": torch.zeros(1, 32)},
    ):
        save_file(damaged, path)
        assert_raises(ModelError, lambda: locate_weights(source, shapes), str(path), "linear.weight (24, 32)")
        assert_raises(ModelError, lambda: full_state_dict(source, 0), str(path))
    path.unlink()
    assert_raises(ModelError, lambda: full_state_dict(source, 0), str(path))


def test_lengths(st_dir, hf_dir):
    source = opened(st_dir)
    assert resolve_max_length(source, load_tokenizer(source)) == 24
    settings = part(st_dir, "Transformer") / "sentence_bert_config.json"
    settings.rename(settings.with_name("sentence_xlm-roberta_config.json"))
    assert opened(st_dir).tokenization.max_length == 24
    settings.with_name("sentence_xlm-roberta_config.json").unlink()
    assert opened(st_dir).tokenization.max_length is None
    assert resolve_max_length(opened(st_dir), load_tokenizer(source)) == 24  # the saved tokenizer knows it too
    settings.write_text('{"max_seq_length": "long"}')
    assert_raises(ModelError, lambda: opened(st_dir), "max_seq_length='long'")

    plain = opened(hf_dir, pooling=Pooling.cls)
    tokenizer = load_tokenizer(plain)
    assert resolve_max_length(plain, tokenizer) == 48  # of the tokenizer
    tokenizer.model_max_length = int(1e30)
    assert resolve_max_length(plain, tokenizer) == 64  # 66 positions, the first two of which XLM-R leaves free
    assert resolve_max_length(opened(hf_dir, pooling=Pooling.cls, max_length=64), tokenizer) == 64
    long = opened(hf_dir, pooling=Pooling.cls, max_length=65)
    assert_raises(ConfigError, lambda: resolve_max_length(long, tokenizer), "model.max_length=65", "64 positions")


def test_longest_allowed_text_has_positions(hf_dir):
    source = opened(hf_dir, pooling=Pooling.cls)
    ids = torch.full((1, 64), 7)
    assert assemble_encoder(source).eval()(Chunk(ids, torch.ones_like(ids)))[0].isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        assemble_encoder(source).eval()(Chunk(torch.full((1, 65), 7), torch.ones(1, 65, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("own", "query", "document"),
    [
        ({"prompts": {"query": "Q", "document": "D"}}, "Q", "D"),
        ({"prompts": {"query": "Q", "passage": "P"}}, "Q", "P"),
        ({"prompts": {"all": "A"}, "default_prompt_name": "all"}, "A", "A"),
        ({"prompts": {"all": "A", "query": "Q"}, "default_prompt_name": "all"}, "Q", "A"),
        ({"prompts": {"query": None}}, "", ""),
        ({"prompts": None}, "", ""),
        ({}, "", ""),
    ],
)
def test_prompts(st_dir, own, query, document):
    (st_dir / "config_sentence_transformers.json").write_text(json.dumps(own))
    prompts = opened(st_dir).prompts
    assert (prompts.get("query", ""), prompts.get("document", "")) == (query, document)


@pytest.mark.parametrize("own", [{"prompts": ["a"]}, {"prompts": {"a": "A"}, "default_prompt_name": "b"}, ["prompts"]])
def test_broken_prompts(st_dir, own):
    (st_dir / "config_sentence_transformers.json").write_text(json.dumps(own))
    assert_raises(ModelError, lambda: opened(st_dir), "config_sentence_transformers.json")


def test_lowercasing(st_dir):
    """sentence-transformers lowercases texts if a directory sets it, independently of the tokenizer."""
    rewrite(part(st_dir, "Transformer") / "sentence_bert_config.json", do_lower_case=True)
    source = opened(st_dir)
    ids = load_tokenizer(source)("Alpha BETA")["input_ids"]
    assert ids == SentenceTransformer(str(st_dir), device="cpu").tokenizer("Alpha BETA")["input_ids"]
    assert ids == load_tokenizer(source)("alpha beta")["input_ids"]


def test_tokenizers(hf_dir, tmp_path):
    source = opened(hf_dir, pooling=Pooling.cls)
    check_vocabulary(source, load_tokenizer(source))
    other = tmp_path / "other"
    load_tokenizer(source).save_pretrained(other)
    assert len(load_tokenizer(source, str(other))) == len(load_tokenizer(source))
    larger = load_tokenizer(source)
    larger.add_tokens([f"new{i}" for i in range(40)])
    assert_raises(ModelError, lambda: check_vocabulary(source, larger), "ends at 63", "ids up to")
    for content in ("{", "[]", '{"model": 3}'):
        (hf_dir / "tokenizer.json").write_text(content)
        assert_raises(ModelError, lambda: load_tokenizer(source), str(hf_dir))
    for file in hf_dir.glob("tokenizer*"):
        file.unlink()
    assert_raises(ModelError, lambda: load_tokenizer(source), str(hf_dir), "no tokenizer")


def test_tokenizer_without_padding_token(hf_dir):
    rewrite(hf_dir / "tokenizer_config.json", pad_token=...)
    assert load_tokenizer(opened(hf_dir, pooling=Pooling.cls)).pad_token == "</s>"
    rewrite(hf_dir / "tokenizer_config.json", eos_token=...)
    assert_raises(ModelError, lambda: load_tokenizer(opened(hf_dir, pooling=Pooling.cls)), "neither a padding")


@pytest.mark.parametrize(
    "path", ["no/such/directory", "./none", "/none/at/all", "~/nothing-here", "nobody/nothing", "a b"]
)
def test_missing_model(path):
    """A Hub id without a network, and missing directories."""
    assert_raises(
        ModelError, lambda: open_model_source(model_options(path=path, pooling=Pooling.cls)), f"model.path={path}"
    )


@pytest.mark.parametrize("path", [None, ""])
def test_no_model(path):
    assert_raises(ConfigError, lambda: open_model_source(model_options(path=path)), "model.path")


def test_model_from_a_configuration(hf_dir):
    values = small_model("bert").config
    for given in (values, str(hf_dir / "config.json"), str(hf_dir)):
        source = open_model_source(model_options(config=given, pooling=Pooling.mean))
        assert (source.directory, source.config.hidden_size, source.vectors.normalize) == (None, 32, True)
        assert locate_weights(source, {}) is None
    assert_raises(ConfigError, lambda: load_tokenizer(source), "model.tokenizer")
    assert_raises(ConfigError, lambda: open_model_source(model_options(config=values)), "model.pooling")
    assert_raises(ConfigError, lambda: open_model_source(model_options(config=values, path="x")), "keep one")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 32}, "model_type"),
        ({"model_type": "bertt"}, "bertt"),
        ({"model_type": "bert", "hidden_sise": 32}, "did you mean hidden_size?"),
        ({"model_type": "bert", "hidden_size": "big"}, "hidden_size"),
        (["bert"], "model.config"),
        ("/no/config.json", "/no/config.json"),
    ],
)
def test_invalid_configurations(config, words):
    assert_raises(ConfigError, lambda: open_model_source(model_options(config=config, pooling=Pooling.cls)), words)


def test_configuration_that_cannot_be_built():
    source = open_model_source(model_options(config={"model_type": "bert", "hidden_size": 33}, pooling=Pooling.cls))
    assert_raises(ModelError, lambda: build_encoder(source), "33")


def test_encoder_decoders_are_rejected(tmp_path):
    T5Config().save_pretrained(tmp_path)
    assert_raises(ModelError, lambda: opened(tmp_path, pooling=Pooling.mean), "t5", "encoder-decoder")
    config = {"model_type": "t5"}
    assert_raises(
        ModelError, lambda: open_model_source(model_options(config=config, pooling=Pooling.mean)), "encoder-decoder"
    )


def test_unreadable_weights(hf_dir):
    source = opened(hf_dir, pooling=Pooling.cls)
    shapes = {name: tensor.shape for name, tensor in build_encoder(source).state_dict().items()}
    path, index = hf_dir / "model.safetensors", hf_dir / "model.safetensors.index.json"
    whole = load_file(path)

    save_file({k: v for k, v in whole.items() if "layer.1.output.dense" not in k}, path, metadata={"format": "pt"})
    assert locate_weights(source, shapes) is None
    assert_raises(ModelError, lambda: full_state_dict(source, 0), "lacks 2 of", "layer.1.output.dense")

    save_file(whole | {"embeddings.word_embeddings.weight": torch.zeros(9, 32)}, path, metadata={"format": "pt"})
    assert locate_weights(source, shapes) is None
    assert_raises(ModelError, lambda: full_state_dict(source, 0), str(hf_dir))

    path.write_bytes(b"not weights")
    assert_raises(ModelError, lambda: locate_weights(source, shapes), str(path))
    path.unlink()
    assert_raises(ModelError, lambda: full_state_dict(source, 0), str(hf_dir))
    (hf_dir / "pytorch_model.bin").write_bytes(b"not weights")
    assert_raises(ModelError, lambda: full_state_dict(source, 0), str(hf_dir))

    for content in ("{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}'):
        index.write_text(content)
        assert_raises(ModelError, lambda: locate_weights(source, shapes), str(hf_dir))


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_pickle_with_code_is_not_run(hf_dir, tmp_path):
    (hf_dir / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Evil(tmp_path / "marker")}, hf_dir / "pytorch_model.bin")
    assert_raises(ModelError, lambda: full_state_dict(opened(hf_dir, pooling=Pooling.cls), 0), str(hf_dir))
    assert not (tmp_path / "marker").exists()


def test_stored_dtype_is_that_of_most_weights(hf_dir):
    source, path = opened(hf_dir, pooling=Pooling.cls), hf_dir / "model.safetensors"
    assert stored_dtype(source) is torch.float32
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(halves | {"aaa.position_ids": torch.arange(4)}, path, metadata={"format": "pt"})
    assert stored_dtype(source) is torch.bfloat16
