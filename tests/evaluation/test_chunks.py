"""Sets whose documents are in chunks: each is found by its best chunk, and its chunks are found alone.

The reference ranks by loops over the vectors of transformers' class.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from embedtrain import evaluate, load_encoder, mine
from embedtrain.config.recipe import Pooling
from embedtrain.data.images.item import join_chunks
from embedtrain.errors import ConfigError, DataError, ModelError
from tests.runs import metric_rows, run
from tests.small import save_small, small_model, text
from tests.training.test_late_chunking import plain_vectors, write_chunked_rows

DOCUMENTS = {f"d{n}": [text(5 * n + i, 2 + (3 * n + i) % 7) for i in range(1 + n % 4)] for n in range(24)}
# The chunk that each query asks for, and one more document without a word on the chunk.
QUERIES = {f"q{n}": f"d{n}#{(n * 7) % len(DOCUMENTS[f'd{n}'])}" for n in range(0, 24, 2)}


def words(query: str) -> str:
    document, _, number = QUERIES[query].partition("#")
    return " ".join(DOCUMENTS[document][int(number)].split()[:2])


def write_set(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "chunks": chunks} if len(chunks) > 1 else {"_id": name, "text": chunks[0]}
            for name, chunks in DOCUMENTS.items()]  # fmt: skip
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": q, "text": words(q)}) + "\n" for q in QUERIES))
    lines = [f"{query}\t{chunk}\t1" for query, chunk in QUERIES.items()]
    lines[1] += f"\n{list(QUERIES)[1]}\td0\t1"  # a whole document of one chunk
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    return folder


def ndcg(ranked: list[str], relevant: set[str]) -> float:
    found = sum(1 / math.log2(rank + 2) for rank, name in enumerate(ranked[:10]) if name in relevant)
    return found / sum(1 / math.log2(rank + 2) for rank in range(min(10, len(relevant))))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_small(small_model("bert"), tmp_path_factory.mktemp("model"))
    (folder / "chunking.json").write_text(json.dumps({"late": True}))
    return folder


@torch.no_grad()
def expected(model: Path) -> tuple[float, float]:
    """nDCG@10 of documents and of chunks."""
    backbone = AutoModel.from_pretrained(model).eval()
    chunks = {
        f"{name}#{number}": vector
        for name, of_document in DOCUMENTS.items()
        for number, vector in enumerate(plain_vectors(backbone, Pooling.mean, join_chunks(of_document)))
    }
    of_documents, of_chunks = [], []
    for number, (query, chunk) in enumerate(QUERIES.items()):
        (vector,) = plain_vectors(backbone, Pooling.mean, words(query))
        scores = {name: float(vector @ other) for name, other in chunks.items()}
        best = {name: max(s for c, s in scores.items() if c.rpartition("#")[0] == name) for name in DOCUMENTS}
        relevant = {chunk.partition("#")[0]} | ({"d0"} if number == 1 else set())
        of_documents.append(ndcg(sorted(best, key=best.__getitem__, reverse=True), relevant))
        of_chunks.append(ndcg(sorted(scores, key=scores.__getitem__, reverse=True), {chunk}))
    return sum(of_documents) / len(of_documents), sum(of_chunks) / len(of_chunks)


def test_documents_and_chunks_rank_as_in_a_reference_loop(model, tmp_path):
    folder = write_set(tmp_path / "dev")
    documents, chunks = expected(model)
    assert 0.2 < chunks < documents < 1
    metrics = evaluate(str(model), [str(folder)], pooling="mean", quiet=True)
    assert metrics["dev"]["ndcg@10"] == pytest.approx(documents, abs=1e-6)
    assert metrics["dev@chunks"]["ndcg@10"] == pytest.approx(chunks, abs=1e-6)


@pytest.mark.slow
def test_a_training_on_two_ranks_measures_chunks(ranks, model, tmp_path):
    folder = write_set(tmp_path / "dev")
    documents, chunks = expected(model)
    data = write_chunked_rows(tmp_path / "rows.jsonl")
    ranks(
        2, run, f"model.path={model}", f"data.train=[{data}]", f"evaluation.sets=[{folder}]", "train.steps=2",
        f"output_dir={tmp_path / 'run'}", "evaluation.at_start=true", "checkpoint.best_metric=dev@chunks/ndcg@10",
    )  # fmt: skip
    rows = [row for row in metric_rows(tmp_path / "run") if row.get("step") == 0]
    of_sets = {row["set"]: row["ndcg@10"] for row in rows if "set" in row}
    assert of_sets == pytest.approx({"dev": documents, "dev@chunks": chunks}, abs=1e-6)


def test_chunks_that_were_cut_are_one_sentence(model, tmp_path):
    folder = write_set(tmp_path / "dev")
    with pytest.raises(DataError, match=r"documents of 24 are longer than the model reads"):
        evaluate(str(model), [str(folder)], pooling="mean", max_length=10, quiet=True)


def test_a_model_of_whole_texts_reads_no_chunks(tmp_path):
    model = save_small(small_model("bert"), tmp_path / "model")
    with (
        load_encoder(str(model), pooling="mean", quiet=True) as encoder,
        pytest.raises(ConfigError, match=r"chunking\.late=true"),
    ):
        encoder.encode_chunks([["alpha", "beta"]])
    with pytest.raises(ModelError, match=r"in chunks .* model\.chunking\.late=true"):
        evaluate(str(model), [str(write_set(tmp_path / "dev"))], pooling="mean", quiet=True)


def test_mined_negatives_are_other_documents_in_chunks(model, tmp_path):
    """The document of a positive is in the corpus as well, without the number of the chunk that answers."""
    folder = write_set(tmp_path / "dev")
    rows = []
    for query, chunk in QUERIES.items():
        document, _, number = chunk.partition("#")
        rows.append({"query": words(query), "pos": [{"chunks": DOCUMENTS[document], "chunk": int(number)}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine(
        str(model), str(tmp_path / "rows.jsonl"), str(tmp_path / "mined"), corpus=str(folder / "corpus.jsonl"),
        pooling="mean", negatives=20, rank_max=24, relative_margin=None, quiet=True,
    )  # fmt: skip
    (path,) = (tmp_path / "mined").glob("*.jsonl")
    mined = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["query"] for row in mined] == [row["query"] for row in rows]
    for row, before in zip(mined, rows, strict=True):
        chunks = before["pos"][0]["chunks"]
        assert row["pos"] == (before["pos"] if len(chunks) > 1 else chunks)
        negatives = [negative["chunks"] if isinstance(negative, dict) else [negative] for negative in row["neg"]]
        assert all(set(negative) == {"chunks"} for negative in row["neg"] if isinstance(negative, dict))
        assert len(negatives) == 20 and chunks not in negatives and any(len(negative) > 1 for negative in negatives)
