"""Late interaction over pages: directories of both libraries, opened, encoded as their classes do, and refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from embedtrain.config.kinds import kind_of_files
from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.config.recipe import Strategy
from embedtrain.data.images.files import PICTURES, Place, read_picture
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, GlobalBatch, TextRole, Tokens
from embedtrain.distributed import sharding
from embedtrain.distributed.sharding import ParallelLayout, copy_local_rows, shard_encoder, warm_up
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.formats.page_models import backbone_keys
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer, resolve_max_length
from embedtrain.kinds.dense.vision import open_parts
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.build import build_loss
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict, locate_weights
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from embedtrain.models.types import ModelSource
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.commands import call
from tests.image_text.models import picture_item, row_value
from tests.late_vision_models import CASES, ENGINE, TRANSFORMERS, late_oracle, save_late_model
from tests.marks import slow_but
from tests.mine.reference import mine_reference
from tests.mine.runs import mine
from tests.runs import run_without_base
from tests.small import model_options, parallel, text, tokenised
from tests.vision_language.models import save_vision_model
from tests.vision_models import class_states

QUICK = slow_but({(TRANSFORMERS, "qwen2_vl"), (ENGINE, "qwen3_vl"), (ENGINE, "paligemma"), (ENGINE, "idefics3")}, CASES)
TEMPERATURE = 2.0  # torch's softplus is exact below 20
# One chunk of all, and chunks of which some are encoded twice.
WAYS = [
    ("plain", ChunkOptions(10_000, pass_overhead_tokens=10_000)),
    ("tiled", ChunkOptions(80, 90, pass_overhead_tokens=4)),
    ("ring", ChunkOptions(80, 90, pass_overhead_tokens=4)),
]
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
    directory = late_model(TRANSFORMERS, "modernvbert")
    with pytest.raises(ConfigError, match="only_picture_vectors=true: colpali-engine has an argument for it"):
        opened(late_model(ENGINE, "qwen3_vl"), only_picture_vectors=True)
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


def test_names_of_weights_of_older_files():
    """As models were published for transformers 4 and colpali-engine 0.2 and 0.3."""
    stored = {
        "vlm.model.visual.patch_embed.proj.weight": "visual.patch_embed.proj.weight",
        "vlm.model.language_model.norm.weight": "language_model.norm.weight",
        "vlm.vision_tower.vision_model.embeddings.position_embedding.weight":
            "vision_tower.embeddings.position_embedding.weight",
        "model.language_model.model.layers.0.mlp.up_proj.weight": "language_model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight": "language_model.layers.1.mlp.up_proj.weight",
        "model.embed_tokens.weight": "language_model.embed_tokens.weight",
        "base_model.model.model.text_model.layers.0.attn.Wo.weight": "text_model.layers.0.attn.Wo.weight",
    }  # fmt: skip
    more = ["vlm.lm_head.weight", "custom_text_proj.weight", "model.norm_of_others.weight"]
    assert backbone_keys([*stored, *more], stored.values()) == {name: key for key, name in stored.items()}


def test_items_have_at_most_the_tokens_of_the_largest_page(tmp_path, late_model):
    _, tokenizer = opened(late_model(ENGINE, "idefics3"))
    path = tmp_path / "large.png"
    Image.new("RGB", (900, 900)).save(path)
    picture = read_picture(Place(str(path)))
    PICTURES.add(picture, Place(str(path)))
    assert tokenizer.layout.num_vectors(tokenizer.tokens([str(picture)])) == tokenizer.max_length


def test_refused(tmp_path, late_model):
    directory = late_model(TRANSFORMERS, "qwen2_vl")
    _, tokenizer = opened(directory)
    page = picture_item(tmp_path, 1)
    for item, says in ((f"{page}text", "beside texts"), (page + page, "beside others")):
        with pytest.raises(
            DataError, match=rf"picture_1\.png: stands {says} in one item, and ColQwen2ForRetrieval reads a text or one"
        ):
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


def batch_of(folder: Path, has_texts: bool) -> GlobalBatch:
    """Questions about pages; one page is wanted by two, and with `has_texts` few documents are pages."""
    pages = [picture_item(folder, number) for number in (1, 2, 3, 1, 4)]
    if has_texts:
        pages[1:] = [text(number, 3) for number in range(4)]
    others = [text(9, 4), picture_item(folder, 5)]
    return GlobalBatch(
        0, tuple(Example(text(n, 2 + n), Documents((page, others[n % 2]))) for n, page in enumerate(pages))
    )


def double(source: ModelSource) -> Encoder:
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, 0))
    return encoder.double().eval()


def plain_gradient(directory: Path, folder: Path, has_texts: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Each item alone by transformers' class, MaxSim with loops, plain autograd, in float64."""
    source, tokenizer = opened(directory)
    encoder, image = double(source), int(source.config.image_token_id)

    def vectors(item: str, role: TextRole) -> torch.Tensor:
        chunk = tokenizer.chunk(tokenizer.tokens([item], role=role), [0])
        states = class_states(source.config.model_type, encoder, chunk, image)
        return F.normalize(encoder.dense[0].linear(states), dim=-1)

    batch = batch_of(folder, has_texts)
    items = [item for row in batch.rows for item in row.documents.texts]
    documents = [vectors(item, TextRole.document) for item in items]
    total = torch.zeros((), dtype=torch.float64)
    for number, row in enumerate(batch.rows):
        query = vectors(row.query, TextRole.query)
        scores = torch.stack([(query @ document.T).amax(dim=1).sum() for document in documents]) / TEMPERATURE
        equal = torch.tensor([item == row.documents.texts[0] for item in items])
        equal[2 * number] = False
        target = torch.tensor(2 * number)
        total = total + F.cross_entropy(scores.masked_fill(equal, -torch.inf), target) / len(batch.rows)
    total.backward()
    return total.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@patch.object(sharding, "_precision", lambda _: MixedPrecisionPolicy())  # ranks are used again
def sharded_gradients(world: World, directory: Path, folder: Path) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """The same on several ranks, sharded, in each of WAYS and for both batches."""
    source, tokenizer = opened(directory)
    encoder = double(source)
    enable_packing(encoder)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    layout = ParallelLayout(Strategy.fsdp, 1, world.size, "", activation_checkpointing=True)
    shard_encoder(encoder, find_blocks(encoder), layout, parallel(), world.device)
    for name, tensor in encoder.state_dict().items():
        copy_local_rows(tensor, state[name])
    warm_up(encoder, Chunk.of_one_token(world.device))
    answers = []
    for implementation, way in WAYS:
        config = InfoNCEConfig(temperature=TEMPERATURE, implementation=Implementation(implementation))
        loss = build_loss(config, dimension=encoder.dimension, seed=0, score=MaxSim(mean=False))
        backward = Backward(encoder, loss, world, seed=0, dummy=tokenizer.dummy(), reduce_per_step=True)
        for has_texts in (False, True):
            encoder.zero_grad()
            rows = tokenised(batch_of(folder, has_texts), tokenizer)
            output, finite = backward(make_rank_batch(rows, world.rank, world.size, tokenizer, way))
            assert finite
            grads = {n: p.grad.full_tensor() for n, p in encoder.named_parameters() if isinstance(p.grad, DTensor)}
            answers.append((sum(world.gather(output.local_loss.item())), grads))
    return answers


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [(TRANSFORMERS, "qwen2_vl")]),
        pytest.param(1, CASES, marks=pytest.mark.slow),
        pytest.param(2, CASES, marks=pytest.mark.slow),
        pytest.param(3, CASES, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(ranks, tmp_path, late_model, size, cases):
    """With gradient caching, around the ring, and where some ranks have no pages."""
    # With three ranks, whose number the loss is multiplied by, norms in float32 round to other numbers.
    tolerance = 1e-6 if size == 3 else 1e-12
    for case in cases:
        expected = [plain_gradient(late_model(*case), tmp_path, has_texts) for has_texts in (False, True)]
        answers = ranks(size, sharded_gradients, late_model(*case), tmp_path, timeout=280)[0]
        for number, (loss, grads) in enumerate(answers):
            expected_loss, expected_grads = expected[number % 2]
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            assert grads.keys() == expected_grads.keys(), case
            for name, grad in grads.items():
                in_float32 = case[1] == "paligemma" and "norm" in name  # Gemma sums these gradients in float32
                allowed = (1e-6 if in_float32 else tolerance) * max(1.0, expected_grads[name].norm().item())
                assert (grad - expected_grads[name]).norm() <= allowed, (case, name)


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


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_mined_pages_are_those_of_the_class(ranks, tmp_path, late_model, rows, size):
    """The negatives of the definition, with scores of the library's class in float64."""
    directory = late_model(TRANSFORMERS, "qwen2_vl")
    oracle, vectors = late_oracle(TRANSFORMERS, directory), dict[str, torch.Tensor]()

    def of(role: str, item: str) -> torch.Tensor:
        if item not in vectors:
            vectors[item] = oracle.vectors(role, open_parts(item)[0]).double()
        return vectors[item]

    def score(query: str, documents: Sequence[str]) -> np.ndarray:
        return np.array([(of("query", query) @ of("document", page).T).amax(1).sum().item() for page in documents])

    pages = {
        f"images/{read_picture(Place(str(path))).key:016x}.png": str(read_picture(Place(str(path))))
        for path in rows.glob("picture_*.png")
    }
    for path in rows.glob("picture_*.png"):
        picture_item(rows, int(path.stem.removeprefix("picture_")))
    given = [json.loads(line) for line in (rows / "train.jsonl").read_text().splitlines()]
    as_items = [
        {"query": row["query"]}
        | {
            name: [picture_item(rows, int(Path(page["image"]).stem.removeprefix("picture_"))) for page in row[name]]
            for name in ("pos", "neg")
        }
        for row in given
    ]
    [expected] = mine_reference([as_items], [], score, negatives=4, rank_max=12, rank_min=1)
    ranks(
        size,
        mine,
        [
            f"model={directory}",
            f"data=[{rows / 'train.jsonl'}]",
            f"output_dir={tmp_path / 'mined'}",
            "negatives=4",
            "rank_max=12",
            "rank_min=1",
            "relative_margin=null",
        ],
    )
    mined = [json.loads(line) for line in (tmp_path / "mined/train.jsonl").read_text().splitlines()]
    for row, (negatives, scores, _) in zip(mined, expected, strict=True):
        assert [pages[page["image"]] for page in row["neg"]] == negatives
        assert row["neg_scores"] == pytest.approx(scores, abs=1e-4)


def run_options(rows: Path, directory: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        "name=t", "model.kind=late_interaction", "train.global_batch_size=8", "train.log_every=1", "train.steps=2",
        "train.chunk_tokens=300", "optim.lr=1e-3", "loss.temperature=1.0", "parallel.precision=fp32",
        "parallel.compile=false", "checkpoint.every=2", "evaluation.at_start=false", "model.query_prompt=Find it.",
        "model.query_length=40", "tracking.report=false",
        f"model.path={directory}", f"data.train=[{rows / 'train.jsonl'}]", f"evaluation.sets=[{rows / 'dev.jsonl'}]",
        f"output_dir={output_dir}", *more,
    ]  # fmt: skip


def require_vectors_of_class(writer: str, directory: Path, rows: Path) -> None:
    """A page and a query have the vectors of the library's class."""
    source, tokenizer = opened(directory)
    encoder, oracle, page = loaded(source), late_oracle(writer, directory), picture_item(rows, 1)
    for role, item, given in ((TextRole.document, page, open_parts(page)[0]), (TextRole.query, "alpha", "alpha")):
        with torch.no_grad():
            vectors = encoder(tokenizer.chunk(tokenizer.tokens([item], role=role), [0]))[0]
        torch.testing.assert_close(vectors, oracle.vectors(role.value, given), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_new_projection_with_adapters(ranks, tmp_path, rows):
    """A vision-language model becomes one of a library's class; adapters and the projection are trained."""
    base = save_vision_model("qwen2_5_vl", tmp_path)
    more = ["model.lora={rank: 2, targets: all-linear}", "model.image.frozen=true"]
    ranks(2, train, rows, *run_options(rows, base, tmp_path / "run", *more), timeout=280)
    exported = tmp_path / "run/model"
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["ColQwen2ForRetrieval"]
    stored, before = load_file(exported / "model.safetensors"), load_file(base / "model.safetensors")
    changed = {
        key
        for key, tensor in stored.items()
        for old in before
        if key.endswith(old) and not torch.equal(tensor, before[old])
    }
    assert changed
    assert not any("vis" in key for key in changed)
    require_vectors_of_class(TRANSFORMERS, exported, rows)
    call("export", f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'exported'}")
    again = load_file(tmp_path / "exported/model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in stored.items())


EXPORTED = slow_but({(TRANSFORMERS, "qwen2_vl")}, [case for case in CASES if case[0] == TRANSFORMERS])


@pytest.mark.parametrize("case", EXPORTED, ids="-".join)
def test_trained_and_exported_as_it_was_read(ranks, tmp_path, late_model, rows, case):
    """The export is opened by the classes of its library, with the vectors that training saw, and trains further."""
    directory = late_model(*case)
    ranks(1, train, rows, *run_options(rows, directory, tmp_path / "run"))
    exported = tmp_path / "run/model"
    files = {"config.json": ("architectures", "model_type", "embedding_dim")}
    files["processor_config.json"] = ("query_prefix", "visual_prompt_prefix", "processor_class")
    for file, names in files.items():
        stored, before = (json.loads((folder / file).read_text()) for folder in (exported, directory))
        assert [stored[name] for name in names] == [before[name] for name in names]
    source, tokenizer = opened(exported)
    assert source.prompts["query"] == "Find it."
    assert source.settings.vision.processing == opened(directory)[0].settings.vision.processing
    page = picture_item(rows, 1)
    tokens = tokenizer.tokens([page])
    with torch.no_grad():
        vectors, before = (loaded(of)(tokenizer.chunk(tokens, [0]))[0] for of in (source, opened(directory)[0]))
    expected = late_oracle(TRANSFORMERS, exported).vectors("document", open_parts(page)[0])
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)
    assert (vectors - before).abs().max() > 1e-3
    card = (exported / "README.md").read_text()
    assert "model = MultiVectorEncoder(" in card
    assert "| transformers (5.23) | exactly |" in card
