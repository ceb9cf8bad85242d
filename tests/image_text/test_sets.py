"""Evaluation sets with pictures from files: each layout that is read, one document for equal pictures, and errors."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.evaluation import Classifier, SetKind
from embedtrain.data.images.item import MARK
from tests.evaluation.files import beir, error_of, jsonl, read
from tests.image_text.models import picture_item


def picture(folder: Path, seed: int) -> dict[str, object]:
    """A picture as the Image of `datasets` in Parquet."""
    picture_item(folder, seed)
    return {"bytes": (folder / f"picture_{seed}.png").read_bytes(), "path": f"page_{seed}.png"}


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    """A Parquet file as `datasets` writes it, whose columns of pictures have the type Image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_beir_folder(tmp_path):
    """Documents are texts, pictures or both, and a query is a picture."""
    item = [picture_item(tmp_path / "set" / "pages", seed) for seed in range(3)]
    folder = beir(tmp_path / "set", {}, {}, "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\n")
    corpus = [{"_id": "d1", "image": "pages/picture_0.png"}, {"_id": "d2", "text": "a"}]
    jsonl(folder / "corpus.jsonl", [*corpus, {"_id": "d3", "text": "b", "image": "pages/picture_1.png"}])
    jsonl(folder / "queries.jsonl", [{"_id": "q1", "text": "x"}, {"_id": "q2", "image": "pages/picture_2.png"}])
    data = read(folder).data
    assert data.documents.texts == [item[0], "a", f"{item[1]}b"]
    assert data.queries == {"q1": "x", "q2": item[2]}
    jsonl(folder / "corpus.jsonl", [*corpus, {"_id": "d1", "image": "pages/picture_1.png"}])
    assert MARK not in (error := error_of(folder)) and "corpus.jsonl:3: the id 'd1' has another text" in error
    jsonl(folder / "corpus.jsonl", [*corpus, {"_id": "d3", "image": "pages/none.png"}])
    error = error_of(folder)
    assert "corpus.jsonl:3: " in error and "none.png" in error


def test_the_configurations_of_vidore(tmp_path):
    """corpus, queries and qrels of a repository, with the bytes of pages in Parquet."""
    items = [picture_item(tmp_path / "pages", seed) for seed in range(3)]
    pages = [{"corpus-id": seed, "image": picture(tmp_path / "pages", seed), "markdown": "m"} for seed in range(3)]
    table(tmp_path / "set" / "corpus" / "test.parquet", pages)
    table(tmp_path / "set" / "queries" / "test.parquet", [{"query-id": 7, "query": "x", "language": "en"}])
    table(tmp_path / "set" / "qrels" / "test.parquet", [{"query-id": 7, "corpus-id": 1, "score": 2}])
    names = ("corpus", "queries", "qrels")
    configs = [f"- config_name: {n}\n  data_files:\n  - split: test\n    path: {n}/test.parquet\n" for n in names]
    (tmp_path / "set" / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    data = read(tmp_path / "set").data
    assert (data.documents.ids, data.documents.texts) == (["0", "1", "2"], items)
    assert (data.queries, data.judgements) == ({"7": "x"}, {"7": {"1": 2}})


def test_the_third_version_of_vidore(tmp_path):
    """Ids with underscores, and other columns: the document of a page is not its id, and its OCR is not read."""
    items = [picture_item(tmp_path / "pages", seed) for seed in range(3)]
    pages = [
        {
            "corpus_id": seed,
            "image": picture(tmp_path / "pages", seed),
            "doc_id": "a",
            "markdown": "m",
            "page_number_in_doc": seed,
        }
        for seed in range(3)
    ]
    queries = [{"query_id": 7, "query": "x", "language": "english", "raw_answers": ["y"], "answer": "y"}]
    boxes = [{"annotator": 0, "x1": 1, "x2": 2}]
    tables = {"corpus": pages, "queries": queries, "documents_metadata": [{"doc_id": "a", "file_name": "a.pdf"}]}
    tables["qrels"] = [{"query_id": 7, "corpus_id": 1, "score": 2, "content_type": ["text"], "bounding_boxes": boxes}]
    for name, rows in tables.items():
        table(tmp_path / "set" / name / "test.parquet", rows)
    configs = [f"- config_name: {n}\n  data_files:\n  - split: test\n    path: {n}/test.parquet\n" for n in tables]
    (tmp_path / "set" / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    data = read(tmp_path / "set").data
    assert (data.documents.ids, data.documents.texts) == (["0", "1", "2"], items)
    assert (data.queries, data.judgements) == ({"7": "x"}, {"7": {"1": 2}})


def test_rows_of_questions_and_pages(tmp_path):
    """ViDoRe's first form: a page of several questions is one document, and one without a question is searched."""
    items = [picture_item(tmp_path / "pages", seed) for seed in range(3)]
    rows = [("x", 0), ("y", 1), ("z", 0), (None, 2)]
    shown = [
        {"query": query, "image": picture(tmp_path / "pages", seed), "image_filename": f"{seed}.png", "answer": "a"}
        for query, seed in rows
    ]
    loaded = read(table(tmp_path / "docs.parquet", shown))
    assert loaded.data.documents.texts == items
    assert list(loaded.data.queries.values()) == ["x", "y", "z"]
    assert loaded.data.judgements == {"q0": {"d0": 1}, "q1": {"d1": 1}, "q2": {"d0": 1}}
    assert not any(MARK in note for note in loaded.notes)


@pytest.mark.parametrize("name", ["flickr.tsv", "flickr.jsonl"])
def test_captions_of_pictures(tmp_path, name):
    """Columns of files, one row for each caption; both directions."""
    items = [picture_item(tmp_path, seed) for seed in range(2)]
    rows = [{"filepath": f"picture_{i // 2}.png", "caption": f"[caption] {i}"} for i in range(4)]
    if name == "flickr.tsv":
        lines = ["\t".join(row.values()) for row in rows]
        (tmp_path / name).write_text("\n".join(["filepath\tcaption", *lines]) + "\n")
    else:
        jsonl(tmp_path / name, [{"query": row["caption"], "pos": [{"image": row["filepath"]}]} for row in rows])
    data = read(tmp_path / name).data
    assert data.documents.texts == items
    assert [data.judgements[query] for query in data.queries] == [{"d0": 1}] * 2 + [{"d1": 1}] * 2
    data = read(tmp_path / name, exchange_sides=True).data
    assert data.queries == {"d0": items[0], "d1": items[1]} and len(data.documents) == 4


def test_pictures_with_labels(tmp_path):
    """Classified by texts; and a column of another name is a picture as well."""
    items = [picture_item(tmp_path, seed) for seed in range(2)]
    jsonl(tmp_path / "train.jsonl", [{"text": f"a photo of a {name}", "label": name} for name in ("cat", "dog")])
    jsonl(
        tmp_path / "test.jsonl", [{"image": f"picture_{i}.png", "label": name} for i, name in enumerate(("dog", "cat"))]
    )
    data = read(tmp_path, kind=SetKind.classification, classifier=Classifier.centroid).data
    assert (data.train_texts[1], data.texts, data.labels) == ("a photo of a dog", items, ["dog", "cat"])
    error = error_of(
        jsonl(tmp_path / "other.jsonl", [{"image": "picture_9.png", "label": "cat"}] * 2),
        train="train",
        kind=SetKind.classification,
    )
    assert "other.jsonl:1: " in error and "picture_9.png" in error


def test_pictures_in_another_folder_and_of_another_name(tmp_path):
    """`image_dir` and `image_columns` of a set, which hold for all of its tables."""
    items = [picture_item(tmp_path / "pages", seed) for seed in range(2)]
    options = {"image_dir": str(tmp_path / "pages"), "image_columns": ["scan"]}
    folder = beir(tmp_path / "set", {}, {}, "query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    jsonl(folder / "corpus.jsonl", [{"_id": "d1", "scan": "picture_0.png"}])
    jsonl(folder / "queries.jsonl", [{"_id": "q1", "image": "picture_1.png"}])
    data = read(folder, **options).data
    assert (data.documents.texts, data.queries) == (items[:1], {"q1": items[1]})
    rows = jsonl(tmp_path / "rows.jsonl", [{"caption": "a", "scan": "picture_0.png"}])
    assert read(rows, **options).data.documents.texts == items[:1]
    assert "image_columns: there is no 'page', only caption, scan" in error_of(rows, image_columns=["page"])
    jsonl(tmp_path / "train.jsonl", [{"image": f"picture_{i}.png", "label": i} for i in range(2)])
    test = jsonl(tmp_path / "test.jsonl", [{"image": f"picture_{i}.png", "label": i} for i in range(2)])
    data = read(test, kind=SetKind.classification, image_dir=options["image_dir"]).data
    assert (data.train_texts, data.texts) == (items, items)
    outside = jsonl(tmp_path / "outside.jsonl", [{"caption": "a", "image": "../picture.png"}])
    assert "outside of" in error_of(outside) and "image_dir" in error_of(outside)
