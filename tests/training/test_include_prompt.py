"""A prompt left out of mean pooling: the plain definition's gradient, and sentence-transformers' vectors."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig, Similarity
from embedtrain.config.recipe import ModelConfig, Pooling, Precision, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.rows import Documents, Example, TextFormat
from embedtrain.data.train_data import TrainData, load_train_data
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.evaluation.sentence_transformers import SentenceTransformersAdapter
from embedtrain.formats.source import open_model_source
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.encoding_plan import PromptedTexts
from embedtrain.inference.loading.load import load_model
from embedtrain.inference.vector_cache import VectorCache, model_identity
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.training.backward import Backward
from embedtrain.training.guides import GuideModel
from embedtrain.training.rank_batch import ChunkOptions, GuideTokenizer, make_rank_batch
from tests.checkpoint.exporting import architecture_of, export_model
from tests.small import WORDS, model_options, parallel, save_small, small_model, small_tokenizer

TEMPERATURE = 0.2
ROWS = [
    {"query": "gamma", "pos": ["delta epsilon"]},
    {"query": "gamma zeta eta", "pos": ["theta"], "neg": ["iota", "kappa lambda nu"], "prompt": "zeta zeta"},
    {"query": "lambda lambda", "pos": ["nu nu nu nu"], "prompt": ""},
    {"query": "kappa", "pos": ["eta a b c"], "prompt": "iota", "type": "symmetric_sts"},
    {"query": "nu theta", "pos": ["x y"]},
]
TEXT_FORMAT = TextFormat(
    query_prompt="alpha beta ", document_prompt="mu ", instruction_format="{instruction} kappa {text} z"
)
# Prompt and text of each query, then of each document.
SEEN = [
    ("alpha beta ", "gamma"), ("zeta zeta kappa ", "gamma zeta eta z"), ("", "lambda lambda"),
    ("iota kappa ", "kappa z"), ("alpha beta ", "nu theta"),
    ("mu ", "delta epsilon"), ("mu ", "theta"), ("mu ", "iota"), ("mu ", "kappa lambda nu"), ("mu ", "nu nu nu nu"),
    ("iota kappa ", "eta a b c z"), ("mu ", "x y"),
]  # fmt: skip
POSITIVES = [0, 1, 4, 5, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for architecture in ("xlm-roberta", "llama"):
        save_small(small_model(architecture), folder / architecture)
    return folder


def options(folder: Path, architecture: str, **more: object) -> ModelConfig:
    values = {"pooling": Pooling.mean, "include_prompt": False, "path": str(folder / architecture), **more}
    return model_options(**values)


def plain_gradient(model: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    encoder = assemble_encoder(open_model_source(model))
    encoder.load_state_dict(full_state_dict(open_model_source(model), seed=0))
    encoder.double().eval()
    tokenizer = small_tokenizer()

    def encode(prompt: str, text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(prompt + text)["input_ids"]])
        hidden = encoder.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        first = 1 + len(prompt.split()) if prompt else 0  # a token a word, and <s>
        return F.normalize(hidden[first:].mean(0), dim=0)

    vectors = torch.stack([encode(*one) for one in SEEN])
    logits = vectors[: len(ROWS)] @ vectors[len(ROWS) :].T / TEMPERATURE
    loss = F.cross_entropy(logits, torch.tensor(POSITIVES))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def train_data(folder: Path) -> TrainData:
    source = TrainSource(path=str(folder / "rows.jsonl"))
    cache = Cache(directory=folder / "cache")
    return load_train_data([source], text_format=TEXT_FORMAT, seed=1, global_batch_size=5, cache=cache)


def gradient(world: World, folder: Path, model: ModelConfig, cutting: ChunkOptions):
    loaded = load_model(model, parallel(), world, seed=0)
    loaded.encoder.eval()
    data = train_data(folder)
    data.prepare(loaded.tokenizer, Cache(directory=folder / "cache"))
    loss = InfoNCE(InfoNCEConfig(temperature=TEMPERATURE))
    backward = Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy())
    output, _ = backward(make_rank_batch(data.batch(0), world.rank, world.size, loaded.tokenizer, cutting))
    actual = {n: p.grad.full_tensor() for n, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)}
    return output.local_loss.item(), actual if world.is_main else {}


@pytest.mark.quick("xlm-roberta")
@pytest.mark.parametrize("architecture", ["xlm-roberta", "llama"])
def test_gradient_equals_the_plain_one(ranks, folder, architecture):
    model = options(folder, architecture)
    loss, expected = plain_gradient(model)
    whole = torch.stack([one.norm() for one in expected.values()]).norm()
    for world_size in (1, 2):
        for cutting in (ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(24, pass_overhead_tokens=4)):
            answers = ranks(world_size, gradient, folder, model, cutting)
            assert sum(local_loss for local_loss, _ in answers) == pytest.approx(loss, rel=1e-6)
            actual = answers[0][1]
            assert actual.keys() == expected.keys()
            for name, one in expected.items():
                assert (actual[name].double() - one).norm() < 1e-5 * max(one.norm(), 1e-3 * whole), name


def vectors(world: World, directory: str, texts: list[str], prompt: str, max_length: int | None):
    model = load_model(model_options(path=directory, max_length=max_length), parallel(), world, seed=0, work=None)
    encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=24, query_prompt=prompt)
    actual = encoder.encode_all(texts, prompt)
    each = encoder.encode_all([prompt + text for text in texts], existing_prompt=[prompt] * len(texts))
    torch.testing.assert_close(each, actual)
    theirs = SentenceTransformersAdapter(encoder).encode(texts, prompt=prompt, convert_to_tensor=True)
    torch.testing.assert_close(theirs, actual)
    guide = GuideModel(
        model.encoder,
        GuideTokenizer(model.tokenizer, TextFormat(query_prompt=prompt, document_prompt="mu "), 24),
        Similarity.cosine,
        world,
    )
    seen = guide(guide.texts([Example(text, Documents(("nu lambda",))) for text in texts]), len(texts))
    torch.testing.assert_close(seen.queries.float(), actual, atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.documents.float()[:1], encoder.encode_all(["nu lambda"], "mu "), atol=1e-5, rtol=0)
    assert model_identity(model.source, Precision.fp32, world)["include_prompt"] is False
    vector_cache = VectorCache(Path("vectors"), {})
    directories = {
        vector_cache.for_texts(prompted, prompted.text_keys(world), model.tokenizer, None, 24).directory
        for prompted in (PromptedTexts(texts, "", prompt) for prompt in ("", "a ", ["a "]))
    }
    assert len(directories) == 3
    return actual, model.source.vectors.include_prompt


@pytest.mark.parametrize("architecture", ["xlm-roberta", pytest.param("llama", marks=pytest.mark.slow)])
def test_vectors_are_those_of_sentence_transformers(ranks, folder, tmp_path, architecture):
    built = architecture_of(tmp_path / "made", options(folder, architecture))
    export_model(tmp_path / "out", built)
    assert json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())["include_prompt"] is False
    texts = [" ".join(WORDS[(i * j) % 13] for j in range(1, 2 + i)) for i in range(9)] + ["gamma", "gamma"]
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for prompt in ("alpha beta ", "zeta: ", ""):
        for max_length in (None, 6):
            theirs.max_seq_length = max_length or 48
            expected = theirs.encode(texts, prompt=prompt, convert_to_tensor=True)
            for world_size in (1, 2):
                for actual, include_prompt in ranks(
                    world_size, vectors, str(tmp_path / "out"), texts, prompt, max_length
                ):
                    assert include_prompt is False
                    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    theirs.set_pooling_include_prompt(True)
    theirs.max_seq_length = 48
    other = theirs.encode(texts, prompt="alpha beta ", convert_to_tensor=True)
    theirs.set_pooling_include_prompt(False)
    assert (other - theirs.encode(texts, prompt="alpha beta ", convert_to_tensor=True)).norm(dim=1).min() > 0.01
    # Asked by hand the directory's word is taken back.
    assert open_model_source(model_options(path=str(tmp_path / "out"))).vectors.include_prompt is False
    included = model_options(path=str(tmp_path / "out"), include_prompt=True)
    assert open_model_source(included).vectors.include_prompt is True


@pytest.mark.parametrize("pooling", [Pooling.cls, Pooling.last])
def test_it_is_refused_where_it_has_no_effect(folder, pooling):
    with pytest.raises(ConfigError, match=r"model\.include_prompt=false is for model\.pooling=mean"):
        open_model_source(options(folder, "xlm-roberta", pooling=pooling))
