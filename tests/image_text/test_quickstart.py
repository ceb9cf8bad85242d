"""recipe=quickstart_images: its drawn scenes, and a model that finds them."""

import io
import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer

from tests.conftest import ROOT
from tests.docs.pages import load_hook
from tests.runs import evaluation_metrics, metric_rows, run_without_base

FOLDER = ROOT / "recipes" / "quickstart_images"


@pytest.fixture(scope="module")
def scenes():
    return load_hook("scenes")


def rows(name: str) -> list[dict]:
    return pq.read_table(FOLDER / f"{name}.parquet").to_pylist()


def test_the_data_is_what_the_hook_draws(scenes):
    """No scene twice, none in both sets, and `datasets` knows the column of pictures."""
    drawn = scenes.scenes(sum(scenes.SETS.values()))
    assert len(set(drawn)) == len(drawn)
    captions = {caption for scene in drawn for caption in (scene.caption(), scene.caption(reverse=True))}
    assert len(captions) == 2 * len(drawn), "a caption has one picture"
    stored = [row for name in scenes.SETS for row in rows(name)]
    chance = random.Random(scenes.SEED)
    for number, (scene, row) in enumerate(zip(drawn, stored, strict=True)):
        assert row["caption"] == scene.caption(reverse=chance.random() < 0.5)
        picture = scenes.draw(scene, chance)
        if number % 100 == 0:
            with Image.open(io.BytesIO(row["image"]["bytes"])) as file:
                assert np.array_equal(np.asarray(file.convert("RGB")), np.asarray(picture.convert("RGB")))
    features = json.loads(pq.read_schema(FOLDER / "dev.parquet").metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000


def arguments(output_dir, *more: str) -> list[str]:
    return ["recipe=quickstart_images", f"output_dir={output_dir}", "evaluation.at_start=false", *more]


def test_a_few_steps(ranks, tmp_path):
    """As it is, but for the numbers of steps and rows; the vocabulary has the words of captions alone."""
    train = f"data.train=[{{path: {FOLDER / 'train.parquet'}, max_rows: 300}}]"
    ranks(1, run_without_base, *arguments(tmp_path, train, "train.steps=2", "checkpoint.every=0"))
    assert evaluation_metrics(tmp_path)[2].keys() == {"recall@1", "recall@5"}
    assert [row["set"] for row in metric_rows(tmp_path) if "set" in row] == ["dev", "captions", "mean"]
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    words = {"large", "small", "purple", "triangle", "above", "right"}
    assert {f"\u2581{word}" for word in words} <= model.tokenizer.get_vocab().keys()
    assert len(model.tokenizer) < 400


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_unseen_scenes_are_found(ranks, tmp_path, seed):
    ranks(2, run_without_base, *arguments(tmp_path, f"seed={seed}", "evaluation.every=0"), timeout=900)
    found = {row["set"]: row["recall@1"] for row in metric_rows(tmp_path) if "set" in row}
    assert found["dev"] > 0.75
    assert found["captions"] > 0.75
