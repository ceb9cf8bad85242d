"""Late interaction over pages: directories of both libraries, opened, encoded as their classes do, and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from embedtrain.config.kinds import kind_of_files
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole, Tokens
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer, resolve_max_length
from embedtrain.kinds.dense.vision import open_parts
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict, locate_weights
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from embedtrain.models.types import ModelSource
from tests.image_text.models import picture_item, row_value
from tests.late_vision_models import CASES, ENGINE, TRANSFORMERS, late_oracle, save_late_model
from tests.marks import slow_but
from tests.runs import run_without_base
from tests.small import model_options, text

QUICK = slow_but({(TRANSFORMERS, "qwen2_vl"), (ENGINE, "qwen3_vl"), (ENGINE, "paligemma"), (ENGINE, "idefics3")}, CASES)
TEXTS = ["alpha beta", "  two\nlines\n", "What is it?"]


@pytest.fixture(scope="module")
def late_model(tmp_path_factory):
    """The directory of a case."""
    made: dict[tuple[str, str], Path] = {}

    def directory(writer: str, architecture: str) -> Path:
        if (writer, architecture) not in made:
            folder = tmp_path_factory.mktemp("late")
            made[writer, architecture] = save_late_model(writer, architecture, folder)
        return made[writer, architecture]

    return directory


def opened(directory: Path, **options: Any) -> tuple[ModelSource, TextTokenizer]:
    source = open_model_source(model_options("late_interaction", path=str(directory), **options))
    tokenizer = load_tokenizer(source)
    layout = source.kind.layout(source, tokenizer)
    return source, TextTokenizer(tokenizer, resolve_max_length(source, tokenizer), layout, packed=True)


def loaded(source: ModelSource) -> Encoder:
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, 0))
    enable_packing(encoder)
    return encoder.eval()


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_vectors_are_those_of_the_class(tmp_path, late_model, case):
    """Packed, alone, and by the library of the directory: queries, texts as documents, and pages."""
    writer, architecture = case
    directory = late_model(writer, architecture)
    assert kind_of_files(directory)[0].name == "late_interaction"
    source, tokenizer = opened(directory)
    encoder, oracle = loaded(source), late_oracle(writer, directory)
    pages = [picture_item(tmp_path, number) for number in range(3)]
    queries = tokenizer.tokens(TEXTS, role=TextRole.query)
    documents = tokenizer.tokens([*pages, *TEXTS[:1]], role=TextRole.document)
    tokens = Tokens.concatenated([queries, documents])
    given = [*[("query", text) for text in TEXTS], *[("document", open_parts(page)[0]) for page in pages]]
    given.append(("document", TEXTS[0]))
    chunk = tokenizer.chunk(tokens, range(len(tokens)))
    assert chunk.ids[0].tolist() == [number for role, item in given for number in oracle.ids(role, item)]
    expected = torch.cat([oracle.vectors(role, item) for role, item in given])
    with torch.no_grad():
        packed = encoder(chunk)[0]
        alone = torch.cat([encoder(tokenizer.chunk(tokens, [row]))[0] for row in range(len(tokens))])
    assert list(chunk.sizes) == tokenizer.layout.num_vectors(tokens).tolist()
    torch.testing.assert_close(packed, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(alone, expected, atol=1e-6, rtol=0)
    shapes = {name: tensor.shape for name, tensor in build_encoder(source).state_dict().items()}
    assert locate_weights(source, shapes).keys() == shapes.keys()  # each weight can be read by itself


def test_pages_of_pictures_alone(tmp_path, late_model):
    """Only rows of a page's picture have vectors, the same as among all; queries and texts keep theirs."""
    directory = late_model(ENGINE, "idefics3")
    page = picture_item(tmp_path, 1)
    rows = []
    for only in (False, True):
        source, tokenizer = opened(directory, only_picture_vectors=only)
        texts = tokenizer.tokens(TEXTS[:1], role=TextRole.query)
        tokens = Tokens.concatenated([tokenizer.tokens([page, TEXTS[0]]), texts])
        chunk = tokenizer.chunk(tokens, range(3))
        with torch.no_grad():
            rows.append(loaded(source)(chunk)[0].split(chunk.sizes.tolist()))
        assert tokenizer.layout.num_vectors(tokens).tolist() == [len(part) for part in rows[-1]]
    is_picture = chunk.ids[0, : len(rows[0][0])] == source.config.image_token_id
    assert torch.equal(rows[1][0], rows[0][0][is_picture])
    assert torch.equal(rows[1][1], rows[0][1])
    assert torch.equal(rows[1][2], rows[0][2])


def test_refused(tmp_path, late_model):
    directory = late_model(TRANSFORMERS, "qwen2_vl")
    _, tokenizer = opened(directory)
    page = picture_item(tmp_path, 1)
    for item, says in ((f"{page}text", "beside texts"), (page + page, "beside others")):
        with pytest.raises(DataError, match=f"a picture {says}, and ColQwen2ForRetrieval reads a text or one page"):
            tokenizer.tokens([item])
    cases = {
        "query_expansion": ("min", "model.query_expansion=min: is not for a model over pages"),
        "page_library": ("colpali_engine", "is a ColQwen2ForRetrieval of transformers, whose vectors are others"),
        "document_prompt": ("Page: ", "what stands before a page is that of ColQwen2Processor; leave it out"),
        "dimension": (7, "model.dimension=7: the projection in .* has 16 dimensions; leave it out"),
    }
    for name, (value, says) in cases.items():
        with pytest.raises(ConfigError, match=says):
            opened(directory, **{name: value})
    config = json.loads((directory / "config.json").read_text())
    config["vlm_config"]["model_type"] = "qwen3_vl"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="ColQwen2ForRetrieval on qwen3_vl is not supported; supported is qwen2_vl"):
        opened(tmp_path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Questions about pages, with other pages as negatives."""
    folder = tmp_path_factory.mktemp("late_rows")
    made = [
        {"query": text(i, 2 + i % 5), "pos": [row_value(folder, i)], "neg": [row_value(folder, i + 20)]}
        for i in range(1, 21, 1)
    ]
    for row in made:  # a page alone, without its text
        for name in ("pos", "neg"):
            row[name] = [value if isinstance(value, str) else {"image": value["image"]} for value in row[name]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[:9]))
    return folder


def train(world: World, folder: Path, *arguments: str) -> None:
    for path in folder.glob("picture_*.png"):
        picture_item(folder, int(path.stem.removeprefix("picture_")))
    run_without_base(world, *arguments)


@pytest.mark.parametrize("case", [(TRANSFORMERS, "qwen2_vl")], ids="-".join)
def test_trained_and_exported_as_it_was_read(ranks, tmp_path, late_model, rows, case):
    """The export is opened by the classes of its library, with the vectors that training saw."""
    directory = late_model(*case)
    options = [
        "name=t", "model.kind=late_interaction", "train.global_batch_size=8", "train.log_every=1", "train.steps=2",
        "train.chunk_tokens=300", "optim.lr=1e-3", "loss.temperature=1.0", "parallel.precision=fp32",
        "parallel.compile=false", "checkpoint.every=2", "evaluation.at_start=false", "model.query_prompt=Find it.",
        f"model.path={directory}", f"data.train=[{rows / 'train.jsonl'}]", f"evaluation.sets=[{rows / 'dev.jsonl'}]",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    ranks(1, train, rows, *options)
    exported = tmp_path / "run/model"
    assert (
        json.loads((exported / "config.json").read_text())["architectures"]
        == json.loads((directory / "config.json").read_text())["architectures"]
    )
