"""Row requirements of losses besides scores: labels, vectors, negatives, the same number of documents per row."""

from decimal import Decimal
from pathlib import Path

import pytest

from embedtrain.config.losses import CoSENTConfig, DistillScoresConfig, TripletConfig
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.train_data import load_train_data
from embedtrain.errors import ConfigError, DataError
from tests.data.files import assert_error, error_of, read, write, write_table

PAIRS = CoSENTConfig().row_requirements
TEACHER = DistillScoresConfig().row_requirements
TRIPLET = TripletConfig().row_requirements
CLASSES = RowRequirements(documents=False, label=True, loss="batch_triplet")
VECTORS = RowRequirements(documents=False, vectors=True, loss="distill_embeddings")
TEXTS = RowRequirements(documents=False, loss="orthogonal")
EVEN = RowRequirements(same_num_documents=True, loss="GISTEmbedLoss")
INFONCE = RowRequirements()

ROW = {"query": "q", "pos": ["a", "b"], "neg": ["c", "d"]}
PAIR = {"sentence1": ["a", "b"], "sentence2": ["c", "d"]}
TRIPLE = {"anchor": ["q"], "positive": ["p"], "negative": ["n"]}


# Columns: classes, vectors, texts alone


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.csv"])
def test_a_text_and_its_class(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, {"text": ["a", "b", "c"], "label": [3.0, 0.0, 12.0]})
    examples, report = read(path, needs=CLASSES)
    assert [(e.query, e.positives.texts, e.label) for e in examples] == [("a", (), 3), ("b", (), 0), ("c", (), 12)]
    assert str(report) == f"t: column text = query, label = class, 3 rows from {name}; one text a row"
    assert read(path, needs=CLASSES, columns=["text", "label"])[0] == examples


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("sports", "must be the number of the row's class, not a text ('sports'): number the classes from 0"),
        (1.5, "must be the number of the row's class, a whole number, not a number (1.5)"),
        (float("nan"), "must be a finite number, not nan"),
        (None, "must be a number, not nothing (null)"),
    ],
)
def test_bad_classes(tmp_path: Path, label: object, message: str) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "a", "label": 1}, {"text": "b", "label": label})
    assert error_of(path, needs=CLASSES) == f'{path}:2: column "label" {message}'


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("t.jsonl", [True, False, True], [1, 0, 1]),
        ("t.csv", [True, False, "true"], [1, 0, 1]),
        ("t.csv", ["3,0", "0", "12.0"], [3, 0, 12]),
        ("t.parquet", [Decimal("3.00"), Decimal(0), Decimal("12.00")], [3, 0, 12]),
    ],
)
def test_classes_as_truth_values_and_decimals(
    tmp_path: Path, name: str, labels: list[object], expected: list[int]
) -> None:
    path = write_table(tmp_path / name, {"text": ["a", "b", "c"], "label": labels})
    assert [example.label for example in read(path, needs=CLASSES)[0]] == expected


def test_sources_without_classes_or_with_too_many_texts(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"title": ["a"], "text": ["b"], "label": [1]})
    assert_error(
        rf"^{path}: loss=batch_triplet .*title, text.*columns=\{{text: title, label: label\}}", path, needs=CLASSES
    )
    assert read(path, needs=CLASSES, columns=["text", "label"])[0][0].query == "b"
    path = write_table(tmp_path / "u.csv", {"text": ["b"]})
    assert "loss=batch_triplet needs the class of every row, and no column is" in error_of(path, needs=CLASSES)
    assert_error(rf"^{path}: columns=\['label'\]", path, ConfigError, needs=CLASSES, columns=["label"])
    assert "rows need a text; there is: label" in error_of(
        write_table(tmp_path / "v.csv", {"label": [1]}), needs=CLASSES
    )
    path = write(tmp_path / "f.jsonl", ROW)
    assert_error(f"^{path}: loss=batch_triplet needs the class.*FlagEmbedding rows.*label", path, needs=CLASSES)
    assert "needs a teacher's vectors of every text, which Flag" in error_of(path, needs=VECTORS)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.csv"])
def test_vectors(tmp_path: Path, name: str) -> None:
    one = write_table(tmp_path / name, {"text": ["a", "b"], "label": [[0.5, -2], [1.5, 3]]})
    examples, report = read(one, needs=VECTORS)
    assert [[list(vector) for vector in e.vectors] for e in examples] == [[[0.5, -2.0]], [[1.5, 3.0]]]
    assert "column text = query, label = vectors" in str(report)
    for label in ([0.5, -2], [[0.5, -2], [1, 2], [3, 4]]):
        path = write_table(tmp_path / f"three-{name}", {**TRIPLE, "label": [label]})
        (example,), _ = read(path, needs=VECTORS)
        assert [list(vector) for vector in example.vectors] == (label if isinstance(label[0], list) else [label])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([1, 2, 3], "a vector of 3 numbers, where those before have 2"),
        ([[1, 2], [1]], "a vector of 1 numbers, where those before have 2"),
        (
            [[1, 2]] * 3,
            'column "label" has 3 vectors and the row has 2 texts: give one for each, or one list of numbers',
        ),
        ([], 'column "label" must be a vector, a list of numbers, not an empty list'),
        (0.5, 'column "label" must be a vector, a list of numbers, not a number (0.5)'),
        ([1, None], "must be a vector, a list of numbers, not a list ([1, None])"),
        ([1, True], "must be a vector, a list of numbers, not a list ([1, True])"),
        ([[1, 2], 3], 'element 2 of column "label" must be a vector, a list of numbers, not a number (3)'),
        ([1, 1e300], 'column "label" holds a number that is not finite'),
        ([1, 10**400], 'column "label" holds a number that is not finite'),
    ],
)
def test_bad_vectors(tmp_path: Path, label: object, message: str) -> None:
    good = {"a": "x", "b": "y", "label": [1, 2]}
    path = write(tmp_path / "x.jsonl", good, {**good, "label": label}, good)
    error = error_of(path, needs=VECTORS)
    assert error.startswith(f"{path}:2: ")
    assert message in error
    assert len(read(path, OnError.skip, needs=VECTORS)[0]) == 2


def test_vectors_have_one_width_in_all_sources(tmp_path: Path) -> None:
    narrow = write_table(tmp_path / "n.jsonl", {"text": ["a"], "label": [[1, 2]]})
    wide = write_table(tmp_path / "w.jsonl", {"text": ["a"], "label": [[1, 2, 3]]})
    with pytest.raises(DataError, match=r"w\.jsonl:1: .*vector of 3 .* 2"):
        read_sources([TrainSource(path=str(narrow)), TrainSource(path=str(wide))], OnError.stop, VECTORS)
    path = write_table(tmp_path / "t.csv", PAIR)
    assert "loss=distill_embeddings needs a teacher's vectors of every text, and no" in error_of(path, needs=VECTORS)


def test_a_dropped_negatives_vector_is_dropped(tmp_path: Path) -> None:
    table = {"q": ["q"], "p": ["p"], "n": [["p", "n"]], "label": [[[1.0], [2.0], [3.0], [4.0]]]}
    (example,), _ = read(write_table(tmp_path / "v.parquet", table), needs=VECTORS)
    assert [list(vector) for vector in example.vectors] == [[1.0], [2.0], [4.0]]


def test_texts_alone(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"text": ["a", "b"]})
    examples, report = read(path, needs=TEXTS)
    assert [(e.query, e.positives.texts, e.negatives.texts) for e in examples] == [("a", (), ()), ("b", (), ())]
    assert str(report) == "t: column text = query, 2 rows from t.csv; one text a row"
    assert "rows need a query and a positive, as two columns" in error_of(path)
    assert len(read(write_table(tmp_path / "p.csv", PAIR), needs=TEXTS)[0][0].positives.texts) == 1
    assert read(write(tmp_path / "f.jsonl", ROW), needs=TEXTS)[0][0].positives.texts == ("a", "b")


# Negatives, as many in every row, and what contradicts itself


def test_rows_without_a_negative(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROW, {**ROW, "neg": []})
    assert_error(f"^{path}:2: loss=triplet needs a hard negative", path, needs=TRIPLET)
    path = write(tmp_path / "y.jsonl", {**ROW, "neg": ["b", "a"]})
    message = error_of(path, needs=TRIPLET)
    assert "and this one has none other than its positives" in message
    assert message.endswith("data.on_error=skip leaves such rows out")
    assert_error(f"^{path}: negatives=0.*loss=triplet", path, ConfigError, needs=TRIPLET, negatives=0)


def test_the_same_number_of_documents_in_every_row(tmp_path: Path) -> None:
    rows = [{"query": "q", "pos": ["p"], "neg": [f"n{i}" for i in range(count)]} for count in (2, 5)]
    path = write(tmp_path / "a.jsonl", *rows)
    assert_error("^data.train: a .*2 to 5 negatives.*loss=GISTEmbedLoss.*negatives: 2}", path, ConfigError, needs=EVEN)
    assert "rows with 2 to 3 negatives" in error_of(path, ConfigError, needs=EVEN, negatives=3)
    assert "rows with 2 to 5 negatives" in error_of(path, ConfigError, needs=EVEN, negatives=None)
    for negatives in (2, 1, 0):
        assert len(read(path, needs=EVEN, negatives=negatives)[0]) == 2

    two, one = (TrainSource(path=str(path), negatives=count) for count in (2, 1))
    with pytest.raises(ConfigError) as caught:
        read_sources([two, one], OnError.stop, EVEN)
    assert str(caught.value) == (
        "data.train: a has rows with 2 negatives and a-2 with 1, and loss=GISTEmbedLoss needs the same number in "
        "every row: write {path: ..., negatives: 1} for both"
    )
    assert [len(store) for store in read_sources([one, one], OnError.stop, EVEN)] == [2, 2]
    single = TrainSource(path=str(write_table(tmp_path / "t.csv", {"text": ["a"]})))
    pair = TrainSource(path=str(write_table(tmp_path / "p.csv", PAIR)))
    even_texts = RowRequirements(documents=False, same_num_documents=True, loss="orthogonal")
    with pytest.raises(ConfigError, match=r"data\.train: t .*one text.* p "):
        read_sources([pair, single], OnError.stop, even_texts)


@pytest.mark.parametrize(
    ("needs", "what"),
    [
        (CLASSES | INFONCE, "loss=batch_triplet + infonce asks of every row a class and documents, and"),
        (CLASSES | VECTORS, "a class and a teacher's vectors"),
        (PAIRS | VECTORS, "scores of documents and a teacher's vectors"),
        (CLASSES | PAIRS, "a class and scores of documents, and"),
    ],
)
def test_losses_that_cannot_share_rows(tmp_path: Path, needs: RowRequirements, what: str) -> None:
    error = error_of(write(tmp_path / "a.jsonl", ROW), ConfigError, needs=needs)
    assert what in error
    assert error.endswith("and a row cannot hold all of them: leave one of these losses out")


# The table and the drawing


def test_vectors_take_little_more_than_four_bytes_a_number(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": [i + j / 8 for j in range(256)]} for i in range(3000)]
    (table,) = read_sources([TrainSource(path=str(write(tmp_path / "a.jsonl", *rows)))], OnError.stop, VECTORS)
    assert list(table[2345].vectors[0]) == rows[2345]["label"]
    assert table.num_bytes < 3000 * (4 * 256 + 50)


def test_rows_draw_scores_ids_and_vectors_with_their_texts(tmp_path: Path) -> None:
    indices = range(6)
    row = {"query": "q", "pos": [f"p{i}" for i in indices], "neg": [f"n{i}" for i in indices]}
    more = {"pos_scores": [10 + i for i in indices], "neg_scores": list(indices), "neg_id": [f"n{i}" for i in indices]}
    source = TrainSource(path=str(write(tmp_path / "a.jsonl", {**row, **more})), negatives=3)
    data = load_train_data([source], needs=TEACHER, seed=1, global_batch_size=1)
    plain = load_train_data([source], seed=1, global_batch_size=1)
    drawn_documents = set()
    for k in range(50):
        drawn = data.batch(k).rows[0]
        positive, *negatives = drawn.documents.texts
        assert drawn.documents.scores == (10 + int(positive[1]), *(int(text[1]) for text in negatives))
        assert drawn.documents.ids == ("", *negatives)
        assert drawn.query == "q"
        assert (drawn.documents.texts, plain.batch(k).rows[0].documents.scores) == (
            plain.batch(k).rows[0].documents.texts,
            (),
        )
        drawn_documents.add(drawn.documents.texts)
    assert len(drawn_documents) > 30

    texts = {"q": ["q"], "p": [["p1", "p2"]], "n": [["n3", "n4", "n5"]]}
    for name, vectors in {"each.parquet": [[float(i)] for i in range(6)], "one.parquet": [7.0]}.items():
        path = write_table(tmp_path / name, {**texts, "label": [vectors]})
        source = TrainSource(path=str(path), negatives=2)
        data = load_train_data([source], needs=VECTORS, seed=1, global_batch_size=1)
        for k in range(20):
            drawn = data.batch(k).rows[0]
            numbers = [0, *(int(text[-1]) for text in drawn.documents.texts)] if name == "each.parquet" else [7] * 4
            assert [list(vector) for vector in drawn.vectors] == [[number] for number in numbers]


def test_rows_of_one_text_are_drawn(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"text": ["a", "b"], "label": [3, 4]})
    data = load_train_data([TrainSource(path=str(path))], needs=CLASSES, seed=1, global_batch_size=2)
    rows = sorted(data.batch(0).rows, key=lambda row: row.query)
    assert [(row.query, row.documents.texts, row.label, row.vectors) for row in rows] == [
        ("a", (), 3, ()),
        ("b", (), 4, ()),
    ]
    assert sorted(data.texts()) == ["a", "b"]
