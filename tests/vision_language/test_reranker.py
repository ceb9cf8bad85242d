"""Rerankers of texts and pictures: pairs as processors read them, scores of transformers' classes, bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm import processing_smolvlm

from embedtrain.config.kind_settings import PAIR_TEMPLATES, ScoreHead
from embedtrain.config.kinds import kind_of_files
from embedtrain.data.images.files import PICTURES
from embedtrain.data.images.item import pictures_of
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, Pair
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.formats.onnx import require_graph
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.kinds.cross_encoder.vision import pair_messages, scores_of_class
from embedtrain.kinds.dense.options import ImageOptions
from embedtrain.kinds.dense.vision import open_processor
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.packing import enable_packing
from embedtrain.models.types import ModelSource
from tests.image_text.models import picture_item
from tests.marks import slow_but
from tests.small import model_options, save_small, small_model, text, tokenised
from tests.vision_language.models import save_vision_model
from tests.vision_language.rerankers import PAIR_CHAT, save_vision_reranker

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")


@pytest.fixture(autouse=True)
def has_num2words(monkeypatch):
    """SmolVLM's processor asks for it, and uses it for videos alone."""
    monkeypatch.setattr(processing_smolvlm, "num2words", object())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vision_rerankers")


@pytest.fixture(scope="module")
def qwen(folder):
    return save_vision_reranker("qwen3_vl", folder)


def opened(directory: Path, max_length: int = 400, **options: Any) -> tuple[ModelSource, TextTokenizer]:
    source = open_model_source(model_options("cross_encoder", path=str(directory), **options))
    tokenizer = load_tokenizer(source)
    return source, TextTokenizer(tokenizer, max_length, source.kind.layout(source, tokenizer))


def pairs(folder: Path) -> list[Pair]:
    one, two = picture_item(folder, 1), picture_item(folder, 2)
    return [
        Pair("What?", "alpha beta"), Pair("What?", one), Pair(f"{one} beta", f"gamma\n{two}"), Pair(one, ""),
        Pair("", f"{two}{one}"), Pair("alpha\n", f" a\n{two}\n\nb{one}c "), Pair(f"b{two}", text(3, 20)),
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", slow_but({"qwen3_vl"}, ARCHITECTURES))
def test_pairs_and_scores_are_those_of_transformers(folder, architecture):
    """Packed pairs have the score of each alone; a directory, and a plain model with a named template and tied rows."""
    for scorer in (True, False):
        directory = save_vision_reranker(architecture, folder / str(scorer), tied=not scorer, scorer=scorer)
        source, tokenizer = opened(directory, pair_template=None if scorer else "qwen3_vl")
        query, document = (source.prompts[role] for role in ("query", "document"))
        chosen = pairs(folder)
        prompted = [Pair(query + pair.query, document + pair.document) for pair in chosen]
        tokens = tokenizer.tokens(prompted)
        processor = open_processor(directory, source)
        if not scorer:
            processor.tokenizer.chat_template = PAIR_CHAT.replace(
                "Find it.", query[len("<Instruct>: ") :][:-8]
            ).replace("PICTURE", source.settings.vision.template.picture)
        for number, pair in enumerate(chosen):
            messages = pair_messages(pair)
            rendered = processor.tokenizer.apply_chat_template(messages, tokenize=False)
            images = [part["image"] for each in messages for part in each["content"] if part["type"] == "image"]
            expected = processor(text=[rendered], images=[images] if images else None, add_special_tokens=False)
            assert tokenizer.chunk(tokens, [number]).ids[0].tolist() == list(expected["input_ids"][0])
        encoder = assemble_encoder(source)
        encoder.load_state_dict(full_state_dict(source, 0))
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        enable_packing(encoder.eval())
        packed = tokenizer.with_packing(True)
        with torch.no_grad():
            expected = scores_of_class(model, processor, chosen, source.settings.tokens)[0]
            together = encoder(packed.chunk(tokens, range(len(chosen))))[0][:, 0]
            alone = torch.cat([encoder(packed.chunk(tokens, [number]))[0][:, 0] for number in range(len(chosen))])
        torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)  # scores, unlike vectors, have any size
        assert expected.std() > 0.05


def test_only_texts_are_cut(qwen, folder):
    """That of the document first, then that of the query; pictures, prefix and suffix stay, in training as well."""
    source, tokenizer = opened(qwen)
    layout, one, two = tokenizer.layout, picture_item(folder, 1), picture_item(folder, 2)
    special, format_ = layout.num_pair_tokens, layout.pair_format

    def read(query: str, document: str, max_length: int) -> list[int]:
        chunk = tokenizer.chunk(tokenizer.tokens([Pair(query, document)], max_length), [0])
        ids: list[int] = chunk.ids[0].tolist()
        assert ids[: len(format_.before)] == list(format_.before)
        assert ids[-len(format_.after) :] == list(format_.after)
        return ids

    def length(item: str) -> int:
        return int(layout.num_tokens(layout.tokenize([item], 10_000))[0])

    whole = read(f"{one} b", f"{text(1, 9)}{two}{text(2, 9)}", 10_000)
    image, pictures = source.config.image_token_id, length(one) + length(two)
    for fewer in (1, 12, length(text(1, 9)) + length(text(2, 9)) + 1):
        ids = read(f"{one} b", f"{text(1, 9)}{two}{text(2, 9)}", len(whole) - fewer)
        assert len(ids) == len(whole) - fewer
        assert ids.count(image) == whole.count(image)
    assert ids != whole[: len(ids)]
    # The text of a query is kept while there is text of a document.
    of_query = length(f"{one} b\n")
    begin = len(format_.before) + of_query
    assert read(f"{one} b", f"a{two}{text(2, 9)}", of_query + length(two) + special)[:begin] == whole[:begin]
    # A template may limit the part of queries, but for their pictures.
    layout.pair_format = replace(format_, max_query_fraction=0.01)
    assert read(f"{one} b", text(1, 9), 300).count(image) == length(one) - 2
    layout.pair_format = format_
    tokenizer = TextTokenizer(tokenizer.tokenizer, pictures + special - 1, layout)
    with pytest.raises(
        DataError, match=rf"{PICTURES.place(pictures_of(one)[0]).file} .*max_length={pictures + special - 1}"
    ):
        read(f"{one} b", two, pictures + special - 1)
    batch = GlobalBatch(0, (Example(one, Documents((text(1, 2), two))),))
    lengths = [length(item) for item in (one, text(1, 2), two)]  # `tokenised` adds no template
    rows = layout.tokenize([f"{one}\n", text(1, 2), two], 10_000)
    layout.check_rows(rows, torch.tensor([2]).numpy(), pictures + special)
    with pytest.raises(DataError, match="pictures are not cut"):
        layout.check_rows(rows, torch.tensor([2]).numpy(), pictures + special - 1)
    with pytest.raises(DataError, match="pictures are not cut"):
        tokenizer.inputs(tokenised(batch, tokenizer).tokens)
    roomy = TextTokenizer(tokenizer.tokenizer, 400, layout)
    inputs = roomy.inputs(tokenised(batch, roomy).tokens)
    assert inputs.lengths.tolist() == [lengths[0] + lengths[1] + special, lengths[0] + lengths[2] + special]
    assert (inputs.costs > inputs.lengths).all()
    joined = inputs.tokens(torch.arange(2).numpy())
    assert layout.num_tokens(joined).tolist() == inputs.lengths.tolist()
    assert layout.further_costs(joined).tolist() == inputs.further.costs.tolist()


def test_windows_are_of_texts(qwen, folder):
    _, tokenizer = opened(qwen)
    layout, one = tokenizer.layout, picture_item(folder, 1)
    limit = layout.num_pair_tokens + 60
    given = [Pair("alpha", text(1, 60)), Pair("alpha", one)]
    assert (layout.windows(given, limit)[:, 0] > 1).tolist() == [True, False]
    windows = tokenizer.tokens([given[0]._replace(start=0), given[1]._replace(start=0)], limit)
    assert windows.lists() == [tokenizer.tokens([pair], limit).lists()[0] for pair in given]
    with pytest.raises(DataError, match="not read in windows"):
        layout.windows([Pair("alpha", one + text(1, 60))], limit)


def test_what_is_refused(folder, qwen, tmp_path):
    def refused(error: type[Exception], match: str, directory: Path = qwen, **options: Any) -> None:
        with pytest.raises(error, match=match):
            opened(directory, **options)

    plain = save_vision_reranker("qwen2_vl", folder / "plain", scorer=False)
    refused(ConfigError, r"pair_template=null: .*qwen3_vl", plain)
    refused(
        ConfigError,
        r"score_tokens=\['maybe', 'no'\]: 'maybe' is",
        plain,
        pair_template="qwen3_vl",
        score_tokens=["maybe", "no"],
    )
    for options in (
        {"score_head": ScoreHead.classification},
        {"bidirectional": True},
        {"rope_theta": 1e6},
        {"score_labels": [1, 0]},
    ):
        refused(ConfigError, next(iter(options)), **options)
    refused(ModelError, "paligemma, and model.kind=cross_encoder trains", save_vision_model("paligemma", folder))
    refused(ModelError, "modernvbert, and model.kind=cross_encoder trains", save_vision_model("modernvbert", folder))
    texts = save_small(small_model("bert"), tmp_path / "bert")
    refused(ConfigError, r"model.image.frozen=true: .*reads texts alone", texts, image=ImageOptions(frozen=True))
    for chat, match in (
        ("{{ messages[0].content }}", "role query before one of document"),
        (PAIR_CHAT.replace("PICTURE", ""), "not <|image_pad|> once"),
        (PAIR_CHAT.replace("{{- '<Query>:'", "{{- 'PICTURE' if messages[0].content[0].type == 'image' }}{{ '<Query>:'"),
         "elsewhere than between its texts"),
    ):  # fmt: skip
        (qwen / "chat_template.jinja").write_text(
            chat.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
        )
        refused(ModelError, match.replace("|", r"\|"))
    (qwen / "chat_template.jinja").write_text(
        PAIR_CHAT.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
    )
    source, _ = opened(qwen)
    with pytest.raises(ConfigError, match=r"qwen3_vl\) has no ONNX graph"):
        require_graph(source)
    assert kind_of_files(qwen)[0].name == "cross_encoder"
    assert source.settings.template.instruction_format.endswith(PAIR_TEMPLATES["qwen3_vl"].instruction_format[-14:])
    modules = json.loads((qwen / "modules.json").read_text())
    (qwen / "modules.json").write_text(json.dumps(modules[:1]))
    refused(ModelError, "supported in a cross-encoder of a vision-language model")
    (qwen / "modules.json").write_text(json.dumps(modules))
    # A reranker of texts.
    source, tokenizer = opened(texts)
    with pytest.raises(ModelError, match="reads texts alone"):
        tokenizer.tokens([Pair("alpha", picture_item(folder, 1))])
