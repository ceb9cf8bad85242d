"""Static embedding models: made from a model on any number of ranks, and read as sentence-transformers reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from sklearn.decomposition import PCA
from tokenizers import Tokenizer
from tokenizers.models import BPE

from embedtrain.commands.static import compose as compose_static
from embedtrain.commands.static import run as main
from embedtrain.commands.static.table import occurring_tokens, sif_weights
from embedtrain.config.recipe import LoraConfig, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.verify import PROBES
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from tests.runs import evaluation_metrics, losses, rewind_run, run
from tests.small import model_options, save_guide, small_model, small_tokenizer, write_beir, write_rows

TEXTS = [*PROBES, "", "alpha beta gamma", "<s> delta </s> zeta"]


def save_static(directory: Path, dims: int = 32) -> Path:
    """A random table as sentence-transformers saves it: without a padding token, a maximal length or config.json."""
    torch.manual_seed(0)
    table = StaticEmbedding(small_tokenizer().backend_tokenizer, embedding_dim=dims)
    SentenceTransformer(modules=[table, Normalize()], device="cpu").save(str(directory))
    return directory


def opened(directory: Path, *, packed: bool = False, **options: Any) -> tuple[Encoder, TextTokenizer]:
    source = open_model_source(model_options(path=str(directory), **options))
    encoder = assemble_encoder(source).eval()
    encoder.load_state_dict(full_state_dict(source, seed=0))
    return encoder, bound_tokenizer(source, load_tokenizer(source)).with_packing(packed)


def encode(encoder: Encoder, tokenizer: TextTokenizer, texts: Sequence[str]) -> torch.Tensor:
    tokens = tokenizer.tokens(texts)
    order = np.argsort(tokens.lengths, kind="stable")
    chunk = tokenizer.chunk(tokens, order.tolist())
    with torch.no_grad():
        return encoder(chunk)[0][torch.from_numpy(np.argsort(order))]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_vectors_are_those_of_sentence_transformers(tmp_path, packed):
    directory = save_static(tmp_path)
    expected = SentenceTransformer(str(directory), device="cpu").encode(TEXTS, convert_to_tensor=True)
    vectors = encode(*opened(directory, packed=packed), TEXTS)
    torch.testing.assert_close(vectors, expected, atol=2e-5, rtol=0)  # sums of a thousand tokens
    assert not vectors[TEXTS.index("")].any()


@pytest.mark.skipif(
    Version(sentence_transformers.__version__) < Version("6.2"),
    reason="sentence-transformers applies model2vec's mapping and weights from 6.2 on",
)
def test_files_of_model2vec(tmp_path):
    directory = save_static(tmp_path)
    table = load_file(directory / "model.safetensors")["embedding.weight"]
    mapping = torch.arange(len(table)) % 9
    stored = {"embeddings": table[:9].half(), "mapping": mapping, "weights": torch.rand(len(table)).double()}
    save_file(stored, directory / "model.safetensors")
    expected = SentenceTransformer(str(directory), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(encode(*opened(directory), TEXTS), expected.float(), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": Pooling.cls}, r"model\.pooling=cls"),
        ({"kind": "late_interaction"}, r"model\.kind=late_interaction"),
        ({"bidirectional": True}, r"model\.bidirectional=true"),
        ({"lora": LoraConfig(rank=2)}, r"model\.lora"),
    ],
)
def test_options_of_transformers_are_rejected(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(save_static(tmp_path), **options)


def test_files_without_a_table_are_rejected(tmp_path):
    directory = save_static(tmp_path)
    save_file({"other": torch.zeros(2, 2)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors has neither embedding\.weight"):
        opened(directory)


def test_trained_resumed_and_exported(ranks, tmp_path):
    """The table's rows are sharded over three ranks, and resumed with the whole table on each of two."""
    model = save_static(tmp_path / "static")
    rows, dev = write_rows(tmp_path / "train.jsonl", 26), write_beir(tmp_path / "dev", 8)
    arguments = [
        f"model.path={model}", "model.max_length=9", f"data.train=[{rows}]", f"evaluation.sets=[{dev}]",
        "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "optim.lr=0.05", "export.check=true",
        "loss.matryoshka.dims=[32,8]",
    ]  # fmt: skip
    whole, resumed = tmp_path / "run", tmp_path / "resumed"
    for size, output_dir in ((3, whole), (1, tmp_path / "one")):
        ranks(size, run, *arguments, f"output_dir={output_dir}")
    assert losses(whole) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    rewind_run(whole, resumed, 2)
    ranks(2, run, *arguments, "parallel.strategy=ddp", f"output_dir={resumed}")
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-4)
    assert evaluation_metrics(resumed) == evaluation_metrics(whole)
    before, after = (load_file(path / "model.safetensors") for path in (model, whole / "model"))
    assert after.keys() == before.keys()
    assert not torch.equal(after["embedding.weight"], before["embedding.weight"])
    exported = SentenceTransformer(str(whole / "model"), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(exported, encode(*opened(whole / "model"), TEXTS), atol=2e-5, rtol=0)


def test_texts_without_tokens_are_trained_on(ranks, tmp_path):
    """A tokenizer without an unknown token has none for a text of other letters; its vector is 0."""
    letters = {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(BPE(letters, []))
    torch.manual_seed(0)
    table = StaticEmbedding(tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[table], device="cpu").save(str(tmp_path / "static"))
    rows = [{"query": query, "positive": "abc"} for query in ("中文", "ab", "cd", "！")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"model.path={tmp_path / 'static'}", f"data.train=[{tmp_path / 'rows.jsonl'}]", "train.steps=2"]
    ranks(2, run, *arguments, "train.global_batch_size=4", f"output_dir={tmp_path / 'run'}")
    assert all(map(np.isfinite, losses(tmp_path / "run").values()))
    vectors = encode(*opened(tmp_path / "run" / "model"), ["ab", "中文"])
    assert vectors[0].any()
    assert not vectors[1].any()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return save_guide(small_model("bert"), tmp_path_factory.mktemp("teacher"))


def make(_world: Any, arguments: Sequence[str]) -> None:
    main(compose_static(list(arguments)))


def test_the_table_is_that_of_its_formula(ranks, teacher, tmp_path):
    arguments = [f"model={teacher}", "pca_dims=8", "sif_coefficient=0.01", "max_length=20"]
    for size in (1, 3):
        ranks(size, make, [*arguments, f"output_dir={tmp_path / str(size)}"])
    tables = [load_file(tmp_path / str(size) / "model.safetensors")["embedding.weight"] for size in (1, 3)]
    torch.testing.assert_close(*tables, atol=1e-5, rtol=1e-4)

    encoder, tokenizer = opened(teacher)
    vocabulary = small_tokenizer().get_vocab()
    ids = torch.tensor([[0, token, 2] for token in range(len(vocabulary))])
    with torch.no_grad():
        vectors = encoder(Chunk(ids, torch.ones_like(ids)))[0].double().numpy()
    words = np.arange(4, len(vocabulary))  # after <s>, <pad>, </s> and <unk>
    ranked = 1 / np.arange(1, len(words) + 1)
    weights = 0.01 / (0.01 + ranked / ranked.sum())
    expected = (
        PCA(8).fit(vectors[words]).transform(vectors) * np.concatenate([np.full(4, weights[0]), weights])[:, None]
    )
    # A component has no sign of its own.
    torch.testing.assert_close(
        tables[0] @ tables[0].T, torch.from_numpy(expected @ expected.T).float(), atol=1e-5, rtol=0
    )

    model = SentenceTransformer(str(tmp_path / "3"), device="cpu")
    long = "alpha beta " * 30
    torch.testing.assert_close(
        model.encode([long], convert_to_tensor=True), encode(*opened(tmp_path / "3"), ["alpha beta " * 10])
    )
    assert tokenizer.max_length != 20
    settings = json.loads((tmp_path / "3" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in settings] == ["StaticEmbedding", "Normalize"]


def test_weights_of_tokens():
    occurs = np.array([False, True, True, False, True])
    weights = sif_weights(occurs, 1.0)
    total = 1 + 1 / 2 + 1 / 3
    expected = [1 / (1 + p / total) for p in (1, 1, 1 / 2, 1, 1 / 3)]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert sif_weights(occurs, None).tolist() == [1.0] * 5
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["[unused7]", "<unused_3>", "unused"])
    assert occurring_tokens(tokenizer)[-4:].tolist() == [True, False, False, True]


def test_a_static_model_and_too_many_dimensions_are_rejected(ranks, teacher, tmp_path):
    for model, options, message in (
        (save_static(tmp_path / "static"), [], "is a static embedding model already"),
        (teacher, ["pca_dims=33"], "dims: 33 is more than the 32 dimensions"),
    ):
        arguments = [f"model={model}", f"output_dir={tmp_path / 'new'}", *options]
        (error,) = ranks(1, rejection, arguments)
        assert message in error


def rejection(_world: Any, arguments: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as error:
        make(None, arguments)
    return str(error.value)
