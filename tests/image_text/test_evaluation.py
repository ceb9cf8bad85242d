"""Pictures measured: the same floats on any number of ranks, equal to a plain computation on the vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedtrain.config.evaluation import Classifier
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.first_stage import with_bm25_candidates
from embedtrain.evaluation.sets import exchanged
from embedtrain.evaluation.types import ClassificationSet, Corpus, LoadedSet, RetrievalSet
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model
from tests.image_text.models import image_text, picture_item, save_image_text
from tests.small import text

HITS = ("hit@1", "hit@5", "recall@5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    save_image_text("siglip2", folder)
    for seed in range(12):
        picture_item(folder, seed)
    return folder


def captions_and_pictures(folder: Path) -> RetrievalSet:
    """Three captions for each picture, among other texts; two captions are equal texts."""
    pictures = {f"p{i}": picture_item(folder, i) for i in range(10)}
    captions = {f"c{i}-{n}": text(10 * i + n, 2 + (i + n) % 7) for i in range(10) for n in range(3)}
    captions["c9-2"] = captions["c0-1"]
    texts = {f"t{i}": text(200 + i, 4) for i in range(5)}
    judgements = {caption: {f"p{caption[1]}": 1} for caption in captions}
    return RetrievalSet("captions", captions, Corpus.from_dict(pictures | texts), judgements)


def zero_shot(folder: Path) -> ClassificationSet:
    """Eight classes of two prompts each, and pictures to classify."""
    names = [f"class{i}" for i in range(8) for _ in range(2)]
    prompts = [text(300 + i, 3 + i % 4) for i in range(16)]
    labels = [f"class{i % 8}" for i in range(12)]
    pictures = [picture_item(folder, i) for i in range(12)]
    return ClassificationSet("zero-shot", prompts, names, pictures, labels, Classifier.centroid)


def encoder_of(world: World, folder: Path) -> SentenceEncoder:
    model = load_encoder_model(image_text(folder / "siglip2"), Precision.fp32, world)
    return SentenceEncoder.from_model(model, world, chunk_tokens=64)


def measured(world: World, folder: Path, sets: list[LoadedSet]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics, and on rank 0 the vectors by item."""
    for seed in range(12):
        picture_item(folder, seed)
    encoder = encoder_of(world, folder)
    metrics = Evaluator(sets, encoder, world).evaluate()
    items = list(dict.fromkeys(item for loaded in sets for item in items_of(loaded.data)))
    return metrics, dict(zip(items, encoder.encode_all(items).numpy(), strict=True))


def items_of(data: Any) -> list[str]:
    if isinstance(data, RetrievalSet):
        return [*data.queries.values(), *data.documents.texts]
    return [*data.train_texts, *data.texts]


def unit(rows: Any) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def hits(data: RetrievalSet, vectors: dict[str, np.ndarray]) -> dict[str, float]:
    """Recall of Flickr30k and COCO: a query counts if one of its relevant documents is among the first."""
    by_id = sorted(
        zip(data.documents.ids, data.documents.texts, strict=True), reverse=True
    )  # trec_eval's order of ties
    documents = unit([vectors[item] for _, item in by_id])
    found: dict[str, list[float]] = {name: [] for name in HITS}
    for query, item in data.queries.items():
        order = torch.from_numpy(-(documents @ unit(vectors[item]))).argsort(stable=True).tolist()
        is_relevant = [by_id[number][0] in data.judgements[query] for number in order]
        found["hit@1"].append(any(is_relevant[:1]))
        found["hit@5"].append(any(is_relevant[:5]))
        found["recall@5"].append(sum(is_relevant[:5]) / len(data.judgements[query]))
    return {name: float(np.mean(values)) for name, values in found.items()}


def test_both_directions_and_classes_of_prompts(ranks, folder):
    """A corpus of pictures and texts; captions to find for a picture; pictures to classify by prompts."""
    forward = captions_and_pictures(folder)
    backward, notes = exchanged(forward)
    assert not notes and len(backward.queries) == 10 and len(backward.documents) == 30
    assert backward.judgements["p4"] == {"c4-0": 1, "c4-1": 1, "c4-2": 1}
    classes = zero_shot(folder)
    sets = [LoadedSet(forward, metrics=HITS), LoadedSet(classes)]
    sets.insert(
        1, LoadedSet(RetrievalSet("pictures", backward.queries, backward.documents, backward.judgements), metrics=HITS)
    )
    results = [result for size in (1, 2, 3) for result in ranks(size, measured, folder, sets)]
    metrics, vectors = results[0]
    assert all(others == metrics for others, _ in results)
    assert metrics["captions"] == pytest.approx(hits(forward, vectors))
    assert metrics["pictures"] == pytest.approx(hits(backward, vectors))
    assert 0 < metrics["pictures"]["recall@5"] < metrics["pictures"]["hit@5"]
    prompts = unit([vectors[item] for item in classes.train_texts]).reshape(8, 2, -1)
    scores = unit([vectors[item] for item in classes.texts]) @ unit(prompts.mean(axis=1)).T
    best = np.argsort(-scores, axis=1)[:, :5] == (np.arange(12) % 8)[:, None]
    assert metrics["zero-shot"]["accuracy"] == pytest.approx(best[:, 0].mean())
    assert metrics["zero-shot"]["accuracy@5"] == pytest.approx(best.any(axis=1).mean())


def bm25(world: World, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        with_bm25_candidates(LoadedSet(captions_and_pictures(folder)), 5, world)
    return str(caught.value)


def test_bm25_searches_no_pictures(ranks, folder):
    assert ranks(1, bm25, folder)[0].startswith("captions has pictures, and BM25 searches words: write first_stage=")
