"""Directories of vision-language models: opened, tokenized as transformers does, and refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.smolvlm import processing_smolvlm

from embedtrain.commands.verify import clients
from embedtrain.config.kinds import kind_of_files
from embedtrain.data.images.item import pictures_of
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, TextRole
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.formats.export import open_model
from embedtrain.formats.onnx import require_graph
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer, resolve_max_length
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.dense.options import ImageOptions
from embedtrain.kinds.dense.vision import open_parts, open_processor
from embedtrain.kinds.dual_encoder.options import TowerOptions
from embedtrain.models.build import assemble_encoder, full_state_dict, locate_weights
from embedtrain.models.types import ModelSource
from tests.image_text.models import picture_item
from tests.marks import slow_but
from tests.small import model_options, save_small, small_model, tokenised
from tests.vision_language.models import save_vision_model
from tests.vision_models import QWEN

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "modernvbert", "paligemma")
TOKENIZED = slow_but({"qwen2_vl", "qwen3_vl", "idefics3", "modernvbert", "paligemma"}, ARCHITECTURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision_language")
    for architecture in ARCHITECTURES:
        save_vision_model(architecture, folder)
    return folder


@pytest.fixture(autouse=True)
def has_num2words(monkeypatch):
    """SmolVLM's processor asks for it, and uses it for videos alone."""
    monkeypatch.setattr(processing_smolvlm, "num2words", object())


def opened(directory: Path, **options: Any) -> tuple[ModelSource, TextTokenizer]:
    source = open_model_source(model_options("dense", path=str(directory), pooling="last", **options))
    tokenizer = load_tokenizer(source)
    layout = source.kind.layout(source, tokenizer)
    return source, TextTokenizer(tokenizer, resolve_max_length(source, tokenizer), layout)


def items(folder: Path) -> list[str]:
    one, two = picture_item(folder, 1), picture_item(folder, 2)
    return [
        "alpha", "\n\n beta\n", "", one, f"What?{one}", f"{two} gamma\n\n", f"{one}{two}", f" a\n{two}\n\nb{one}c ",
    ]  # fmt: skip


@pytest.mark.parametrize("prompt", ["", "Find it.\n"])
@pytest.mark.parametrize("architecture", TOKENIZED)
def test_tokens_and_positions_are_those_of_the_processor(folder, architecture, prompt):
    directory = folder / architecture
    source, tokenizer = opened(directory)
    processor, chosen = open_processor(directory, source), items(folder)
    processor.tokenizer.chat_template = source.settings.chat_template  # which PaliGemma has in an export alone
    tokens = tokenizer.tokens([prompt + item for item in chosen], prompts=prompt, role=TextRole.query)
    counts = tokenizer.layout.num_tokens(tokens)
    model = assemble_encoder(source).backbone
    for number, item in enumerate(chosen):
        parts = open_parts(item) or [""]
        images = [part for part in parts if not isinstance(part, str)]
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        messages = [{"role": "system", "content": [{"type": "text", "text": prompt}]}] * bool(prompt)
        messages.append({"role": "user", "content": content})
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        starts = processor.tokenizer.bos_token is not None and text.startswith(processor.tokenizer.bos_token)
        options = {"return_tensors": "pt", "add_special_tokens": not starts}
        if architecture == "paligemma" and not images:  # its processor refuses texts
            inputs = processor.tokenizer([text], **options)
        else:
            inputs = processor(text=[text], images=[images] if images else None, **options)
        chunk = tokenizer.chunk(tokens, [number])
        assert chunk.ids[0].tolist() == inputs["input_ids"][0].tolist()
        assert counts[number] == chunk.ids.shape[1]
        if not images:
            continue
        if architecture in QWEN:
            expected = model.get_rope_index(
                inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
            )[0]
            assert torch.equal(chunk.pictures.positions, expected)
        pixels = source.settings.processing
        ours = pixels.patches if architecture in QWEN else pixels.normalised
        theirs = inputs["pixel_values"].flatten(0, 0 if architecture in (*QWEN, "paligemma") else 1)
        torch.testing.assert_close(ours(chunk.decoded["pixels"]), theirs.float(), atol=1e-6, rtol=0)
        # Bytes instead of float32, and no frame twice.
        assert theirs.nbytes == (8 if architecture in QWEN else 4) * chunk.decoded["pixels"].nbytes


@pytest.mark.parametrize("architecture", ["qwen2_vl", pytest.param("modernvbert", marks=pytest.mark.slow)])
def test_vectors_are_those_of_transformers(folder, architecture):
    """Texts, pictures and both; a long text is cut before what stands behind it."""
    source, tokenizer = opened(folder / architecture)
    assert locate_weights(source, {k: v.shape for k, v in assemble_encoder(source).state_dict().items()})
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, 0))
    files = source.kind.files
    vectors = files.probe(encoder.eval(), tokenizer, {}, torch.device("cpu"))
    assert len(vectors) > len(PROBES) + 3
    torch.testing.assert_close(files.of_transformers(folder / architecture, source), vectors, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "modernvbert"])
def test_verify_gives_transformers_the_tokens_of_texts(folder, tmp_path, architecture):
    """A text is a message, and a long one is cut before what stands behind it."""
    source, tokenizer = opened(folder / architecture, max_length=60)
    source.kind.files.write(tmp_path, source, tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for item in ("alpha", " two\nlines ", "alpha beta " * 60):
        assert clients.message_ids({"model": str(tmp_path)}, theirs, item) == tokenizer.ids([item])[0]


def test_only_texts_are_cut(folder):
    _, tokenizer = opened(folder / "qwen2_vl", max_length=80)
    picture = picture_item(folder, 1)
    whole = tokenizer.ids(["alpha beta"])[0]
    for item in ("alpha " * 200, f"{picture}{'alpha ' * 200}", f"{'alpha ' * 200}{picture}{'beta ' * 90}"):
        tokens = tokenizer.tokens([item])
        assert tokenizer.layout.num_tokens(tokens).tolist() == [80]
        assert tokens.slots().pictures() == pictures_of(item)
        assert tokens.ids[-2:].tolist() == whole[-2:], "the end of the template stays"
    with pytest.raises(DataError, match=r"max_length=80: .*model\.image\.max_pixels"):
        tokenizer.tokens([picture * 6])
    with pytest.raises(DataError, match=r"a prompt, which has .*max_length=80"):
        tokenizer.tokens(["a long " * 100 + "text"], prompts="a long " * 100)


def test_an_item_template_replaces_the_chat_template(folder):
    template = "<|im_start|>system\n{prompt}<|im_end|>\n{item}<|endoftext|>"
    _, tokenizer = opened(folder / "qwen3_vl", item_template=template)
    ids = tokenizer.ids(["Find.alpha"], prompts="Find.")[0]
    assert tokenizer.tokenizer.decode(ids) == "<|im_start|>system\nFind.<|im_end|>\nalpha<|endoftext|>"
    picture = tokenizer.chunk(tokenizer.tokens([picture_item(folder, 1)]), [0]).ids[0].tolist()
    shown = tokenizer.tokenizer.decode(picture).replace("<|image_pad|>", "")
    assert shown == "<|im_start|>system\n<|im_end|>\n<|vision_start|><|vision_end|><|endoftext|>"
    assert tokenizer.layout.identity != opened(folder / "qwen3_vl")[1].layout.identity


def test_sizes_of_pictures_are_options(folder):
    source, tokenizer = opened(folder / "qwen3_vl", image=ImageOptions(max_pixels=256))
    processing = source.settings.processing
    assert (processing.min_area, processing.max_area) == (128, 256)
    assert source.settings.processor["image_processor"]["size"] == {"shortest_edge": 128, "longest_edge": 256}
    assert np.all(tokenizer.layout.further_costs(tokenizer.tokens([picture_item(folder, 1)])) <= 16)


def test_a_picture_costs_what_its_tower_computes(folder):
    _, tokenizer = opened(folder / "qwen3_vl")
    picture = picture_item(folder, 1)
    batch = tokenised(GlobalBatch(0, (Example("alpha", Documents((picture, "beta"))),)), tokenizer)
    inputs = tokenizer.inputs(batch.tokens)
    patches = tokenizer.layout.further_costs(tokenizer.tokens([picture]))[0]
    of_tower = math.ceil(float(tokenizer.layout.family.costs(patches)[0]))
    assert of_tower > 0
    assert (inputs.costs - inputs.lengths).tolist() == [0, of_tower, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include_prompt": False}, "model.include_prompt=false"),
        ({"bidirectional": True}, "model.bidirectional=true"),
        ({"item_template": "{prompt}"}, "model.item_template={prompt}.*{item} once"),
        ({"image": ImageOptions(min_pixels=4096)}, "model.image.min_pixels=4096"),
    ],
)
def test_options_that_do_not_fit(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(folder / "qwen2_vl", **options)


def test_options_of_pictures_are_for_models_that_read_them(tmp_path):
    save_small(small_model("bert"), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.image\.frozen=true.*texts alone"):
        opened(tmp_path, image=ImageOptions(frozen=True))


def changed(folder: Path, tmp_path: Path, name: str, change: Any) -> Path:
    """A copy of the directory of Qwen2-VL with another file."""
    directory = tmp_path / "changed"
    directory.mkdir()
    for path in (folder / "qwen2_vl").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    content = json.loads((directory / name).read_text()) if name.endswith(".json") else ""
    written = change(content)
    (directory / name).write_text(written if isinstance(written, str) else json.dumps(written))
    return directory


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda c: c | {"image_token_id": 70_000}, "image_token_id"),
        ("chat_template.jinja", lambda _: "{{ messages[0].content[0].text | upper }}", "model.item_template"),
        ("chat_template.jinja", lambda _: "{% for i in range(99999999) %}{{ i }}{% endfor %}", "chat template"),
        ("preprocessor_config.json", lambda c: c | {"image_processor_type": "Other"}, "Other is not known"),
    ],
)
def test_files_that_cannot_be_used(folder, tmp_path, name, change, message):
    with pytest.raises(ModelError, match=message):
        opened(changed(folder, tmp_path, name, change))


def test_other_models_with_a_vision_tower_are_refused(folder, tmp_path):
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 1}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of_files(tmp_path)[0].name == "dense"
    with pytest.raises(ModelError, match=r"gemma3, .* known are qwen2_vl, .*modernvbert"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.config\.model_type=qwen2_vl"):
        open_model_source(model_options("dense", config={"model_type": "qwen2_vl"}, pooling="last"))
    for kind in ("m3", "sparse"):
        with pytest.raises(ModelError, match=rf"vision-language model, which model\.kind={kind}.*=dense"):
            open_model_source(model_options(kind, path=str(folder / "qwen2_vl")))
    with pytest.raises(ConfigError, match=r"vision-language model, which is no tower"):
        towers = {"query": TowerOptions(path=str(folder / "qwen2_vl"), pooling="last")}
        open_model_source(model_options("dual_encoder", **towers, document=towers["query"]))


def test_a_model_of_random_weights_has_the_files_of_its_tokenizer(folder):
    directory = folder / "qwen2_vl"
    config = json.loads((directory / "config.json").read_text())
    options = {"config": config, "tokenizer": str(directory), "pooling": "last"}
    source = open_model_source(model_options("dense", **options, image=ImageOptions(max_pixels=512)))
    stored, expected = opened(directory, image=ImageOptions(max_pixels=512))
    assert source.directory is None and source.settings == stored.settings
    tokenizer = load_tokenizer(source, str(directory))
    layout = source.kind.layout(source, tokenizer)
    assert layout.identity == expected.layout.identity
    state = full_state_dict(source, 0)
    assert {name: weight.shape for name, weight in state.items()} == {
        name: weight.shape for name, weight in assemble_encoder(stored).state_dict().items()
    }


def test_commands_that_change_models_of_texts_refuse_it(folder):
    with pytest.raises(ConfigError, match=r"a vision-language model \(qwen2_vl\) has no ONNX graph; sentence-trans"):
        require_graph(opened(folder / "qwen2_vl")[0])
    with pytest.raises(ConfigError, match=r"vision-language model \(qwen2_vl\)"):
        open_model(str(folder / "qwen2_vl"), None, None, "last", trust_remote_code=False)
