"""MTEB's own tasks on sets in memory and on given vectors: what metrics are compared with."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from mteb import TaskMetadata
from mteb.abstasks import AbsTask

from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import LoadedSet, metric_names
from tests.evaluation.tiny import sentence_encoder


class GivenVectors:
    """A model of MTEB that looks vectors up; a similarity is that of the two vectors alone, in float64."""

    mteb_model_meta = None

    def __init__(self, vectors: Mapping[str, np.ndarray]) -> None:
        self.vectors = vectors

    def encode(self, inputs: Any, **_options: Any) -> np.ndarray:
        return np.stack([self.vectors[text] for batch in inputs for text in batch["text"]])

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        products = (unit(first).unsqueeze(1) * unit(second).unsqueeze(0)).sum(dim=2)
        return products.float()

    def similarity_pairwise(self, first: Any, second: Any) -> torch.Tensor:
        return (unit(first) * unit(second)).sum(dim=1).float()


def unit(vectors: Any) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(np.asarray(vectors)).double(), dim=1)


def task_of(kind: type[AbsTask], of_type: str, main_score: str, dataset: Any, **attributes: Any) -> AbsTask:
    """A task of MTEB with its data in memory."""
    metadata = TaskMetadata(
        name="InMemory", description="", reference=None, type=of_type, main_score=main_score, category="t2t",
        dataset={"path": "nowhere", "revision": "none"}, eval_splits=["test"], eval_langs=["eng-Latn"],
        date=("2020-01-01", "2020-01-01"), domains=[], task_subtypes=[], license="cc0-1.0",
        annotations_creators="derived", dialect=[], modalities=["text"], sample_creation="created", bibtex_citation="",
    )  # fmt: skip
    task = type("InMemory", (kind,), {"metadata": metadata, **attributes})()
    task.dataset, task.data_loaded = dataset, True
    return task


def scores_of_task(task: AbsTask, vectors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    scores = task.evaluate(GivenVectors(vectors), "test", encode_kwargs={"batch_size": 64})
    return dict(scores["default"])


def splits(**columns: Mapping[str, list[Any]]) -> DatasetDict:
    return DatasetDict({name: Dataset.from_dict(dict(columns[name])) for name in columns})


def retrieval_data(data: Any) -> dict[str, Any]:
    """A RetrievalSet as MTEB's tasks have it."""
    ids, texts = list(data.documents.ids), list(data.documents.texts)
    candidates = data.candidates and {query: [ids[n] for n in numbers] for query, numbers in data.candidates.items()}
    split = {
        "corpus": Dataset.from_dict({"id": ids, "text": texts, "title": [""] * len(ids)}),
        "queries": Dataset.from_dict({"id": list(data.queries), "text": list(data.queries.values())}),
        "relevant_docs": {query: dict(gains) for query, gains in data.judgements.items()},
        "top_ranked": candidates,
    }
    return {"default": {"test": split}}


def encoded(world: Any, texts: list[str]) -> dict[str, np.ndarray]:
    """Vectors by text of the small model: what `measured` measures."""
    vectors = sentence_encoder(world).encode_all(texts)
    return dict(zip(texts, vectors.cpu().numpy(), strict=True))


def measured(world: Any, sets: list[LoadedSet]) -> dict[str, dict[str, float]]:
    """Metrics of the small model."""
    evaluator = Evaluator(sets, sentence_encoder(world), world)
    metrics = evaluator.evaluate()
    assert {name: tuple(values) for name, values in metrics.items()} == metric_names(sets)
    return metrics


def on_any_ranks(ranks: Any, *sets: LoadedSet) -> dict[str, dict[str, float]]:
    """Metrics that are the same floats on each of 1, 2 and 3 ranks."""
    results = [metrics for size in (1, 2, 3) for metrics in ranks(size, measured, list(sets))]
    assert all(result == results[0] for result in results)
    return results[0]
