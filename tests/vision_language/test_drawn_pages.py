"""Pages with known answers, drawn from the quickstart's descriptions: searched and ranked by small models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

from benchmarks.drawn_pages import BM25_DEPTH, write_pages
from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.evaluate import run as evaluate
from embedtrain.config.evaluation import EvaluationSet, IndexConfig
from embedtrain.config.recipe import Precision
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sets import load_sets
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model
from embedtrain.tracking.metrics import DatasetInfo
from tests.image_text.models import save_image_text
from tests.late_vision_models import ENGINE, save_late_model
from tests.small import model_options
from tests.vision_language.rerankers import save_vision_reranker

# The metrics and their names in pytrec_eval.
METRICS = {"ndcg@10": "ndcg_cut_10", "ndcg@100": "ndcg_cut_100", "recall@100": "recall_100"}
Run = dict[str, dict[str, float]]


def measured(world: World, directory: Path, kind: str, pages: Path, token_pooling: float = 1) -> dict[str, Any]:
    """Metrics of a search among all pages, and of the pages that BM25 finds in another order."""
    run = {"path": str(pages), "name": "ranked", "candidates": str(pages / "bm25.run")}
    sets = load_sets([EvaluationSet(path=str(pages), name="pages"), EvaluationSet(**run)], world, metrics=list(METRICS))
    evaluator = Evaluator(
        sets, encoder_of(world, directory, kind), world, index=IndexConfig(token_pooling=token_pooling)
    )
    info = evaluator.datasets["pages"]
    assert info.as_row().get("token_pooling", 1) == token_pooling  # the figures say what they are of
    assert DatasetInfo.of_row({"dataset": info.as_row()}) == info
    return dict(evaluator.evaluate())


def encoder_of(world: World, directory: Path, kind: str) -> SentenceEncoder:
    model = load_encoder_model(model_options(kind, path=str(directory)), Precision.fp32, world)
    return SentenceEncoder.from_model(model, world, chunk_tokens=2048)


def encoded(world: World, directory: Path, kind: str, pages: Path) -> tuple[Any, Any]:
    """The vectors of each query and of each page, by id."""
    (loaded,) = load_sets([EvaluationSet(path=str(pages))], world)
    encoder = encoder_of(world, directory, kind)
    found = []
    for ids, items, role in (
        (list(loaded.data.queries), list(loaded.data.queries.values()), TextRole.query),
        (list(loaded.data.documents.ids), list(loaded.data.documents.texts), TextRole.document),
    ):
        part = encoder.encode(items, role=role)
        sizes = [1] * len(items) if part.sizes is None else part.sizes.tolist()
        found.append(dict(zip(ids, (rows.numpy() for rows in torch.split(part.values, sizes)), strict=True)))
    return found[0], found[1]


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def scores(queries: dict[str, np.ndarray], pages: dict[str, np.ndarray]) -> Run:
    """The cosine of vectors, or the sum over those of a query of the largest to one of a page."""
    documents = np.concatenate([unit(rows) for rows in pages.values()])
    starts = np.cumsum([0, *(len(rows) for rows in pages.values())])[:-1]
    return {
        query: dict(
            zip(pages, np.maximum.reduceat(unit(rows) @ documents.T, starts, axis=1).sum(axis=0).tolist(), strict=True)
        )
        for query, rows in queries.items()
    }


def read_run(path: Path) -> Run:
    run: Run = {}
    for line in path.read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, {})[document] = float(score)
    return run


def trec_eval(folder: Path, run: Run) -> dict[str, float]:
    gains: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels/test.tsv").read_text().splitlines()[1:]:
        query, document, score = line.split("\t")
        gains.setdefault(query, {})[document] = int(score)
    results = pytrec_eval.RelevanceEvaluator(gains, set(METRICS.values())).evaluate(run)
    return {name: sum(results.get(q, {}).get(of, 0.0) for q in gains) / len(gains) for name, of in METRICS.items()}


def pooled(pages: dict[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    pooling = HierarchicalTokenPooling(pool_factor=factor)
    return {name: pooling.pool_one(torch.from_numpy(unit(rows)).float()).numpy() for name, rows in pages.items()}


def require_metrics_of(metrics: dict[str, Any], folder: Path, queries: Any, pages: Any) -> None:
    """They are those of trec_eval on these vectors; only pages that BM25 finds are ranked in the second set."""
    run, found = scores(queries, pages), read_run(folder / "bm25.run")
    assert metrics["pages"] == pytest.approx(trec_eval(folder, run))
    limited = {query: {page: run[query][page] for page in found.get(query, {})} for query in run}
    assert metrics["ranked"] == pytest.approx(trec_eval(folder, limited))
    assert 0 < metrics["pages"]["ndcg@100"] < metrics["ranked"]["ndcg@100"] < 1


def test_a_few_pages(ranks, tmp_path):
    """Late interaction on two ranks, with a third of the vectors."""
    write_pages(tmp_path / "pages", 20)
    directory = save_late_model(ENGINE, "qwen3_vl", tmp_path)
    arguments = (directory, "late_interaction", tmp_path / "pages")
    metrics = ranks(2, measured, *arguments, 3)
    queries, pages = ranks(1, encoded, *arguments)[0]
    assert metrics[0] == metrics[1]
    fewer = pooled(pages, 3)
    assert sum(map(len, fewer.values())) < 0.5 * sum(map(len, pages.values()))
    require_metrics_of(metrics[0], tmp_path / "pages", queries, fewer)


@pytest.mark.slow
def test_all_pages_on_any_number_of_ranks(ranks, tmp_path):
    """The same floats, of one vector a page and of several, with and without pooling; BM25 is the one that is known."""
    folder = tmp_path / "pages"
    write_pages(folder)
    found = read_run(folder / "bm25.run")
    assert len(list((folder / "images").iterdir())) == 1500
    assert max(map(len, found.values())) == BM25_DEPTH
    assert trec_eval(folder, found)["ndcg@10"] == pytest.approx(0.8444, abs=5e-5)  # as docs/rerankers.md has it
    clip = (save_image_text("clip", tmp_path), "image_text", folder)
    late = (save_late_model(ENGINE, "qwen2_vl", tmp_path), "late_interaction", folder)
    for arguments, factor in ((clip, 1), (late, 1), (late, 2)):
        results = [metrics for size in (1, 2, 3) for metrics in ranks(size, measured, *arguments, factor, timeout=600)]
        assert all(metrics == results[0] for metrics in results)
        queries, pages = ranks(2, encoded, *arguments, timeout=600)[0]
        require_metrics_of(results[0], folder, queries, pooled(pages, factor) if factor > 1 else pages)


def reranked(world: World, reranker: Path, pages: Path, output_dir: Path) -> dict[str, Any]:
    """What `evaluate` measures of BM25's run, and of a reranker on it."""
    sets = f"sets=[{{path: {pages}, candidates: {pages / 'bm25.run'}}}]"
    options = [sets, f"reranker={reranker}", f"metrics=[{','.join(METRICS)}]", "save_runs=true"]
    return dict(evaluate(compose_evaluate([*options, "rerank_depth=20", f"output_dir={output_dir}"])))


@pytest.mark.slow
def test_a_reranker_orders_what_bm25_finds(ranks, tmp_path):
    """The same floats on any number of ranks; pages behind the reranked ones are not in its ranking."""
    folder = tmp_path / "pages"
    write_pages(folder, 60)
    reranker = save_vision_reranker("idefics3", tmp_path)
    results = [
        metrics
        for size in (1, 2, 3)
        for metrics in ranks(size, reranked, reranker, folder, tmp_path / str(size), timeout=600)
    ]
    assert all(metrics == results[0] for metrics in results)
    found = read_run(folder / "bm25.run")
    assert results[0]["pages+run"] == pytest.approx(trec_eval(folder, found))
    written = read_run(tmp_path / "1/runs/pages+run+reranker.run")
    assert results[0]["pages+run+reranker"] == pytest.approx(trec_eval(folder, written))
    for query, scored in written.items():
        assert set(scored) == set(sorted(found[query], key=lambda page: -found[query][page])[:20])
    assert results[0]["pages+run+reranker"] != results[0]["pages+run"]
