"""`search` among pictures, and with a picture: what it finds, and that it names files."""

import json

import numpy as np
import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer

from embedtrain.data.images.item import MARK
from tests.commands import call
from tests.image_text.models import picture_item, save_image_text
from tests.small import save_small, small_model, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, ten pictures in folders, and rows with some of these and with texts."""
    folder = tmp_path_factory.mktemp("search")
    save_image_text("clip", folder)
    for seed in range(10):
        picture_item(folder / "photos" / f"{seed % 2}", seed)
    rows = [{"_id": f"p{seed}", "image": f"photos/{seed % 2}/picture_{seed}.png"} for seed in range(3)]
    rows += [{"_id": f"t{seed}", "text": text(seed, 4)} for seed in range(3)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def found(printed: str) -> dict[str, float]:
    """Scores by the name of the document, in their order."""
    assert MARK not in printed
    lines = [line.split() for line in printed.splitlines()]
    return {words[1]: float(words[0]) for words in lines if len(words) > 2 and words[0].lstrip("-")[1:2] == "."}


def test_a_folder_of_pictures(folder):
    """By a text and by a picture, with vectors that are stored by the first search."""
    opened = SentenceTransformer(str(folder / "clip"), device="cpu")
    names = [f"{seed % 2}/picture_{seed}.png" for seed in range(10)]
    pictures = opened.encode([Image.open(folder / "photos" / name) for name in names], normalize_embeddings=True)
    query = opened.encode([text(1, 3)], normalize_embeddings=True)[0]
    more = [f"corpus={folder / 'photos'}", "top_k=10", "precision=fp32", f"vectors_dir={folder / 'vectors'}"]
    printed = call("search", f"model={folder / 'clip'}", f"query={text(1, 3)}", *more)
    scores = dict(zip(names, (pictures @ query).tolist(), strict=True))
    assert found(printed) == pytest.approx(scores, abs=2e-3)
    assert list(found(printed)) == sorted(scores, key=lambda name: -scores[name])
    stored = {path: path.stat().st_mtime_ns for path in (folder / "vectors").rglob("*.safetensors")}
    printed = call("search", f"model={folder / 'clip'}", f"image={folder / 'photos' / names[4]}", *more)
    assert found(printed) == pytest.approx(dict(zip(names, (pictures @ pictures[4]).tolist(), strict=True)), abs=2e-3)
    assert next(iter(found(printed).items())) == (names[4], 1.0)
    assert {path: path.stat().st_mtime_ns for path in (folder / "vectors").rglob("*.safetensors")} == stored
    width, height = Image.open(folder / "photos" / names[4]).size
    assert f"[picture {width}x{height} {folder}/photos/{names[4]}]" in printed.replace("\n", "")


def test_pictures_among_texts(folder):
    printed = call("search", f"model={folder / 'clip'}", f"corpus={folder / 'corpus.jsonl'}", "query=alpha", "top_k=9")
    assert found(printed).keys() == {"p0", "p1", "p2", "t0", "t1", "t2"}
    assert np.diff(list(found(printed).values())).max() <= 0


def test_what_cannot_be_searched(folder, tmp_path):
    photos, corpus = f"corpus={folder / 'photos'}", f"corpus={folder / 'corpus.jsonl'}"
    picture = f"image={folder / 'photos/0/picture_0.png'}"
    bert = save_small(small_model("bert"), tmp_path / "bert")
    model = f"model={folder / 'clip'}"
    assert f"image={tmp_path}/none.png: there is no such file" in call(
        "search", model, photos, f"image={tmp_path}/none.png", code=1
    )
    printed = call("search", f"model={bert}", corpus, picture, "pooling=mean", code=1)
    assert f"{picture}: the model {bert} reads texts alone" in printed
    printed = call("search", f"model={bert}", photos, "query=alpha", "pooling=mean", code=1)
    assert "an item has a picture, and the model reads texts alone" in printed
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "b.jpg").write_bytes(b"<html>")
    printed = call("search", model, f"corpus={tmp_path / 'broken'}", "query=alpha", code=1)
    assert (
        f"1 of its 1 picture cannot be used; move them out of the folder, the first is {tmp_path}/broken/b.jpg"
        in printed
    )
    printed = call("search", model, photos, picture, "query=alpha", code=1)
    assert "an item has a text and a picture" in printed
