"""Scores and ids beside the texts of a row: FlagEmbedding's lists, and columns of scores and margins."""

import random
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.losses import (
    ADRMSEConfig,
    BCEConfig,
    CoSENTConfig,
    CosineMSEConfig,
    DistillScoresConfig,
    LambdaLossConfig,
    ListNetConfig,
    LossConfig,
    OnlineContrastiveConfig,
    PListMLEConfig,
    RankNetConfig,
    SentenceTransformersConfig,
    SoftmaxConfig,
    TripletConfig,
)
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement, with_batch_negatives
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.rows import Example
from embedtrain.errors import ConfigError
from tests.data.files import assert_error, error_of, read, write, write_table

PAIRS = CoSENTConfig().row_requirements
TEACHER = DistillScoresConfig().row_requirements
SOFTMAX = RowRequirements(scores=ScoreRequirement.teacher, loss="SoftmaxLoss")
TRIPLET = TripletConfig().row_requirements

ROW = {"query": "q", "pos": ["a", "b"], "neg": ["c", "d"]}
SCORES = {"pos_scores": [9, 8.5], "neg_scores": [-1.5, 0]}
PAIR = {"sentence1": ["a", "b"], "sentence2": ["c", "d"]}
TRIPLE = {"anchor": ["q"], "positive": ["p"], "negative": ["n"]}


def scores(examples: list[Example]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    return [(e.positives.scores, e.negatives.scores) for e in examples]


# FlagEmbedding rows


@pytest.mark.parametrize("needs", [PAIRS, TEACHER])
def test_scores_of_flagembedding_rows(tmp_path: Path, needs: RowRequirements) -> None:
    examples, report = read(write(tmp_path / "a.jsonl", {**ROW, **SCORES}), needs=needs)
    assert scores(examples) == [((9.0, 8.5), (-1.5, 0.0))]
    assert str(report) == "a: FlagEmbedding rows with scores, 1 rows from a.jsonl; 2 negatives a row"


def test_scores_that_no_loss_needs_are_not_used(tmp_path: Path) -> None:
    examples, report = read(write(tmp_path / "a.jsonl", {**ROW, "pos_scores": "any", "neg_scores": [1]}))
    assert scores(examples) == [((), ())]
    assert str(report).endswith("not used: pos_scores, neg_scores")


def test_ids_are_read_whatever_the_loss(tmp_path: Path) -> None:
    rows = [{**ROW, "pos_id": ["x", 7], "neg_id": [None, "y"]}, {**ROW, "neg_id": ["z", "y"]}, ROW]
    examples, report = read(write(tmp_path / "a.jsonl", *rows))
    assert [e.positives.ids for e in examples] == [("x", "7"), (), ()]
    assert [e.negatives.ids for e in examples] == [("", "y"), ("z", "y"), ()]
    assert str(report).startswith("a: FlagEmbedding rows with ids, 3 rows")
    assert "not used" not in str(report)


def test_scores_and_ids_of_a_dropped_negative_are_dropped(tmp_path: Path) -> None:
    row = {"query": "q", "pos": ["a"], "neg": ["a", "c", "c", "d"]}
    more = {"pos_scores": [9], "neg_scores": [1, 2, 3, 4], "neg_id": ["1", "2", "3", "4"]}
    (example,), report = read(write(tmp_path / "a.jsonl", {**row, **more}), needs=TEACHER)
    assert (example.negatives.texts, example.negatives.scores, example.negatives.ids) == (
        ("c", "d"),
        (2.0, 4.0),
        ("2", "4"),
    )
    assert report.rows.num_dropped == 2


def test_pairs_without_scores_count_1_and_0_and_the_report_says_so(tmp_path: Path) -> None:
    examples, report = read(write(tmp_path / "a.jsonl", ROW, {**ROW, **SCORES}), needs=PAIRS)
    assert scores(examples) == [((1.0, 1.0), (0.0, 0.0)), ((9.0, 8.5), (-1.5, 0.0))]
    assert str(report).endswith("1 rows without scores: positives count 1, negatives 0")
    examples, report = read(write_table(tmp_path / "t.csv", {**TRIPLE}), needs=PAIRS)
    assert scores(examples) == [((1.0,), (0.0,))]
    assert str(report).endswith("1 negatives a row; rows without scores: positives count 1, negatives 0")


BAD_FLAGEMBEDDING = {
    'loss=distill_scores needs a teacher\'s score of every document, and this row has no "neg_scores"': {
        "pos_scores": [1, 2]
    },
    'and this row has no "pos_scores"': {"neg_scores": [1, 2]},
    '"pos_scores" has 1 element and "pos" has 2 texts: give one for each': {**SCORES, "pos_scores": [1]},
    '"neg_scores" has 3 elements and "neg" has 2 texts': {**SCORES, "neg_scores": [1, 2, 3]},
    '"pos_scores" must be a list, one element for each text of "pos", not a number (1)': {**SCORES, "pos_scores": 1},
    'element 2 of "pos_scores" must be a number, not nothing (null)': {**SCORES, "pos_scores": [1, None]},
    "element 1 of \"neg_scores\" must be a number, not a text ('1')": {**SCORES, "neg_scores": ["1", 2]},
    'element 1 of "neg_scores" must be a finite number, not nan': {**SCORES, "neg_scores": [float("nan"), 2]},
    'element 1 of "pos_scores" must be a finite number, not 1e+300': {**SCORES, "pos_scores": [1e300, 2]},
    '"pos_id" has 3 elements and "pos" has 2 texts': {**SCORES, "pos_id": ["a", "b", "c"]},
    '"neg_id" must be a list': {**SCORES, "neg_id": "c"},
    'element 2 of "neg_id" must be an id, a text or a whole number, not a number (1.5)': {**SCORES, "neg_id": [1, 1.5]},
    'element 1 of "pos_id" must be an id, a text or a whole number, not a truth': {**SCORES, "pos_id": [True, 1]},
}


@pytest.mark.parametrize(("message", "more"), BAD_FLAGEMBEDDING.items(), ids=list(BAD_FLAGEMBEDDING))
def test_bad_scores_and_ids_of_flagembedding_rows(tmp_path: Path, message: str, more: dict[str, Any]) -> None:
    good = {**ROW, **SCORES}
    path = write(tmp_path / "x.jsonl", good, good, {**ROW, **more})
    error = error_of(path, needs=TEACHER)
    assert error.startswith(f"{path}:3: ")
    assert message in error
    assert len(read(path, OnError.skip, needs=TEACHER)[0]) == 2


def test_scores_of_only_positives_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {**ROW, "pos_scores": [1, 2]})
    assert_error(f'^{path}:1: loss=cosent .*"neg_scores"', path, needs=PAIRS)


# Columns: scores


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.csv", "t.tsv.gz"])
def test_scored_pairs_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, {"Label": [4.75, 0], **PAIR})
    examples, report = read(path, needs=PAIRS)
    assert [(e.query, e.positives.texts, *e.positives.scores) for e in examples] == [
        ("a", ("c",), 4.75),
        ("b", ("d",), 0.0),
    ]
    assert "columns sentence1 = query, sentence2 = positive, Label = score (by name; " in str(report)
    named, _ = read(path, needs=PAIRS, columns=["sentence2", "sentence1", "Label"])
    assert [(e.query, *e.positives.scores) for e in named] == [("c", 4.75), ("d", 0.0)]
    pattern = f"^{path}: .*neither scores nor hard negatives.*loss=cosent.*columns"
    assert_error(pattern, path, columns=["sentence1", "sentence2"], needs=PAIRS)


FOUR = {**TRIPLE, "negative_2": ["m"]}
SCORED = [
    (PAIR, 0.5, [0.5]),
    (PAIR, [0.5], [0.5]),
    (TRIPLE, 2.5, [0.0, -2.5]),
    (TRIPLE, [2.5], [0.0, -2.5]),
    (TRIPLE, [4, 1.5], [4.0, 1.5]),
    (FOUR, [1, 2.5], [0.0, -1.0, -2.5]),
    (FOUR, [9, 1, 2], [9.0, 1.0, 2.0]),
]


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
@pytest.mark.parametrize(("texts", "score", "expected"), SCORED)
def test_scores_and_margins(
    tmp_path: Path, texts: dict[str, Any], score: object, expected: list[float], name: str
) -> None:
    path = write_table(tmp_path / name, {**{key: values[:1] for key, values in texts.items()}, "scores": [score]})
    (example,), _ = read(path, needs=PAIRS)
    assert [*example.positives.scores, *example.negatives.scores] == expected


def test_scores_of_a_list_of_positives(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.parquet", {"q": ["q"], "p": [["a", "b"]], "score": [[1, 2]]})
    assert scores(read(path, needs=PAIRS)[0]) == [((1.0, 2.0), ())]


BAD_SCORES = [
    (PAIR, "good", "column \"score\" must be a number, not a text ('good')"),
    (PAIR, None, 'column "score" must be a number, not nothing (null)'),
    (PAIR, float("inf"), 'column "score" must be a finite number, not inf'),
    (PAIR, [], 'column "score" has 0 numbers and the row has 1 positive and 0 negatives: give the score of each'),
    (FOUR, [1, 2, 3, 4], 'column "score" has 4 numbers and the row has 1 positive and 2 negatives'),
    (TRIPLE, [1, None], 'element 2 of column "score" must be a number, not nothing (null)'),
    (FOUR, 1.5, 'column "score" is one number, the score of one pair or the margin of one positive over one negative'),
    ({**TRIPLE, "negative": [None]}, 1.5, "and the row has 1 positive and 0 negatives: give a list"),
    ({"q": ["q"], "p": [["a", "b"]], "n": ["n"]}, [1, 2], "has 2 numbers and the row has 2 positives and 1 negative"),
]


@pytest.mark.parametrize(("texts", "score", "message"), BAD_SCORES)
def test_bad_scores_of_columns(tmp_path: Path, texts: dict[str, Any], score: object, message: str) -> None:
    path = write(tmp_path / "x.jsonl", {**{key: values[0] for key, values in texts.items()}, "score": score})
    error = error_of(path, needs=PAIRS)
    assert error.startswith(f"{path}:1: ")
    assert message in error


def test_texts_are_parsed_as_numbers_only_in_csv(tmp_path: Path) -> None:
    assert "not a text ('5')" in error_of(write(tmp_path / "a.jsonl", {"a": "a", "b": "b", "score": "5"}), needs=PAIRS)
    assert "not a text ('[1')" in error_of(write_table(tmp_path / "a.csv", {**PAIR, "score": ["[1", 2]}), needs=PAIRS)
    path = write(tmp_path / "b.jsonl", {"a": "a", "b": "b", "score": 5}, {"a": "a", "b": "b"})
    assert_error(f'^{path}:2: no "score" .*a, b$', path, needs=PAIRS)


def test_which_column_holds_the_scores(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {**TRIPLE, "extra": ["x"]})
    assert_error(
        f"^{path}: loss=distill_scores .*score, scores, .*anchor, positive, negative, extra", path, needs=TEACHER
    )
    path = write_table(tmp_path / "s.csv", {**PAIR, "score": [1, 0], "label": [1, 0]})
    pattern = rf"^{path}: columns 'score' and 'label' .*loss=SoftmaxLoss .*columns=\[sentence1,sentence2,score\]"
    assert_error(pattern, path, needs=SOFTMAX)
    columns = ["sentence1", "sentence2", "label"]
    assert scores(read(path, needs=SOFTMAX, columns=columns)[0]) == [((1.0,), ()), ((0.0,), ())]
    error = error_of(path, needs=SOFTMAX, columns=columns[:2])
    assert error.endswith(
        "no column is named score, scores, label or labels; there is, in columns: sentence1, sentence2; "
        "columns={query: QUERY, positive: POSITIVE, score: SCORE} names one"
    )
    assert "name at least two, query and positive" in error_of(path, ConfigError, needs=PAIRS, columns=columns[1:])


def test_a_score_that_the_loss_does_not_use(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {**PAIR, "score": [1, 0]})
    pattern = rf"^{path}: column 'score' .*loss=triplet .*columns=\[sentence1,sentence2\].*cosent, angle, cosine_mse"
    assert_error(pattern, path, needs=TRIPLET)
    assert "which loss=infonce does not use" in error_of(path)
    assert [e.positives.texts for e in read(path, columns=["sentence1", "score"])[0]] == [
        ("1",),
        ("0",),
    ]  # as the user says


def test_pairs_that_are_all_alike(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", PAIR)
    assert_error(f"^{path}: .*neither scores nor hard negatives.*loss=cosent.*score", path, needs=PAIRS)
    assert "all pairs would be alike" in error_of(write(tmp_path / "a.jsonl", ROW), needs=PAIRS, negatives=0)
    path = write(tmp_path / "b.jsonl", {**ROW, "neg": []}, ROW)
    assert scores(read(path, needs=PAIRS)[0])[0] == ((1.0, 1.0), ())


def test_many_rows_are_read_back_unchanged(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = []
    for i in range(9000):  # three batches of the table
        negatives = [f"n{i}.{j}" for j in range(i % 4)]
        row = {"query": f"q{i}", "pos": [f"p{i}"], "neg": negatives}
        scored = {"pos_scores": [draw.randrange(99)], "neg_scores": [draw.randrange(99) / 4 for _ in negatives]}
        rows.append({**row, **(scored if i % 3 else {}), **({"neg_id": negatives} if i > 8500 else {})})
    (table,) = read_sources([TrainSource(path=str(write(tmp_path / "a.jsonl", *rows)))], OnError.stop, PAIRS)
    for row, example in zip(rows, table, strict=True):
        assert example.positives.scores == tuple(row.get("pos_scores", [1]))
        assert example.negatives.scores == tuple(row.get("neg_scores", [0] * len(row["neg"])))
        assert example.negatives.ids == tuple(row.get("neg_id", []))
        assert (example.label, example.vectors) == (None, ())


# Real data


def test_real_scored_pairs(shared_data: Path) -> None:
    for language in ("en", "zh"):
        examples, report = read(shared_data / "stsb" / language / "train.tsv", needs=PAIRS)
        assert len(examples) == 5749
        assert all(0 <= e.positives.scores[0] <= 5 for e in examples)
        assert examples[0].positives.scores == (5.0,)
        assert "columns sentence1 = query, sentence2 = positive, score = score" in str(report)
    examples, report = read(shared_data / "pawsx-zh" / "dev.tsv", needs=SOFTMAX)
    assert {e.positives.scores for e in examples} == {(0.0,), (1.0,)}
    assert "label = score (by name; " in str(report)


def test_real_triples_and_a_real_teacher(shared_data: Path) -> None:
    triples, needs = (
        shared_data / "nli-triples",
        RowRequirements(negatives=True, same_num_documents=True, loss="TripletLoss"),
    )
    assert "rows with 1 to 2 negatives" in error_of(triples, ConfigError, needs=needs)
    assert len(read(triples, needs=needs, negatives=1)[0]) == 742
    examples, _ = read(triples, needs=PAIRS)
    assert scores(examples)[0] == ((1.0,), (0.0,))
    folder = shared_data / "flagembedding-examples" / "embedder" / "retrieval"
    examples, report = read(folder / "nli.jsonl", needs=TEACHER)
    assert scores(examples)[0] == ((98.1875,), (82.25,))
    assert "FlagEmbedding rows with scores" in str(report)


def test_scores_that_the_loss_cannot_use(tmp_path: Path) -> None:
    """STS-B's run from 0 to 5: compared with a cosine they would ruin the model in silence."""
    rows = [{"a": "x", "b": "y", "score": 1.0}, {"a": "u", "b": "v", "score": 4.5}]
    path = write(tmp_path / "sts.jsonl", *rows)
    pattern = f"^{path}:2: loss=cosine_mse .*from -1 to 1, not 4.5.*score_scale"
    assert_error(pattern, path, needs=CosineMSEConfig().row_requirements)
    pattern = f"^{path}:2: loss=online_contrastive .*whole number from 0 to 1, not 4.5"
    assert_error(pattern, path, needs=OnlineContrastiveConfig().row_requirements)
    softmax = SentenceTransformersConfig(class_name="SoftmaxLoss", arguments={"num_labels": 3})
    assert "a whole number from 0 to 2, not 4.5" in error_of(path, needs=softmax.row_requirements)
    assert len(read(path, needs=CoSENTConfig().row_requirements)[0]) == 2
    table, _ = read(path, needs=CosineMSEConfig().row_requirements, score_scale=5.0)
    assert [row.positives.scores for row in table] == [pytest.approx((0.2,)), pytest.approx((0.9,))]


# Lists


def test_positives_are_the_documents_above_a_score(tmp_path: Path) -> None:
    needs = SoftmaxConfig(positive_above=1.0).row_requirements
    rows = [
        {"query": "q", "docs": ["a", "b", "c"], "labels": [0, 2, 1]},
        {"query": "q", "docs": ["a", "b"], "labels": [1, 0]},
    ]
    examples, _ = read(write(tmp_path / "a.jsonl", rows[0]), needs=needs)
    assert [(e.positives.texts, e.negatives.texts) for e in examples] == [(("b",), ("a", "c"))]
    assert scores(examples) == [((2.0,), (0.0, 1.0))]
    keyed = {**ROW, "pos_scores": [3, 0], "neg_scores": [2, 1], "pos_id": ["x", "y"], "neg_id": ["z", "w"]}
    examples, _ = read(write(tmp_path / "b.jsonl", keyed), needs=needs)
    assert [(e.positives.texts, e.negatives.texts) for e in examples] == [(("a", "c"), ("b", "d"))]
    assert [(e.positives.ids, e.negatives.ids) for e in examples] == [(("x", "z"), ("y", "w"))]
    path = write(tmp_path / "c.jsonl", *rows)
    assert_error(r"c\.jsonl:2: .*softmax.*positive_above=1.* 1; data.on_error=skip", path, needs=needs)
    # Nothing is left to compare the positives with.
    path = write(tmp_path / "d.jsonl", {**rows[0], "labels": [2, 2, 2]})
    assert_error(r"d\.jsonl:1: .*softmax needs a hard negative", path, needs=needs)


@pytest.mark.parametrize(
    "config",
    [ListNetConfig(), RankNetConfig(), LambdaLossConfig(), PListMLEConfig(), ADRMSEConfig()],
    ids=lambda config: config.name,
)
def test_a_row_with_nothing_to_rank(tmp_path: Path, config: LossConfig) -> None:
    needs, rows = config.row_requirements, [ROW, {**ROW, "pos_scores": [0, 0], "neg_scores": [0, 0]}]
    path = write(tmp_path / "a.jsonl", *rows)
    assert_error(rf"a\.jsonl:2: loss={config.name} .*4 documents .* 0; data.on_error=skip", path, needs=needs)
    examples, report = read(path, needs=needs, on_error=OnError.skip)
    assert scores(examples) == [((1.0, 1.0), (0.0, 0.0))]
    assert "a.jsonl:2" in str(report)


def test_rows_of_negatives_alone(tmp_path: Path) -> None:
    """They are documents with labels, or 0, for losses of all documents of a row, and errors for all other losses."""
    conversation = [[{"role": "user", "content": text}] for text in "qab"]
    rows = [
        {"query": "q", "pos": [], "neg": ["a", "b", "a"], "neg_id": ["x", "y", "x"]},
        {"messages": conversation[0], "positive_messages": [], "negative_messages": conversation[1:]},
        {"query": "q", "positive_passages": [], "negative_passages": [{"docid": "x", "text": "a"}, {"text": "b"}]},
    ]
    bce, softmax, ranknet = (loss.row_requirements for loss in (BCEConfig(), SoftmaxConfig(), RankNetConfig()))
    for number, row in enumerate(rows):
        path = write(tmp_path / f"{number}.jsonl", row)
        (example,), _ = read(path, needs=bce)
        assert (example.positives.texts, example.positives.scores) == (("a", "b"), (0.0, 0.0))
        assert (example.negatives.texts, example.negatives.scores, example.negatives.ids) == ((), (), ())
        assert_error(rf"{number}\.jsonl:1: .* is empty: a row needs at least one positive", path, needs=softmax)
        assert_error(rf"{number}\.jsonl:1: loss=ranknet .*2 documents .* 0; data.on_error=skip", path, needs=ranknet)
    graded = {"query": "q", "pos": [], "neg": ["a", "b"], "neg_scores": [0, 2]}
    (example,), _ = read(write(tmp_path / "graded.jsonl", graded), needs=ranknet)
    assert (example.positives.texts, example.positives.scores) == (("a", "b"), (0.0, 2.0))
    path = write(tmp_path / "none.jsonl", {"query": "q", "pos": [], "neg": []})
    assert_error(r"none\.jsonl:1: .*neither positives nor negatives", path, needs=bce)


@pytest.mark.parametrize("config", [SoftmaxConfig(), RankNetConfig()], ids=lambda config: config.name)
def test_rows_that_get_documents_of_other_rows(tmp_path: Path, config: LossConfig) -> None:
    """They need no negatives of their own, and their labels are not below those of other rows' documents."""
    needs = with_batch_negatives(config.row_requirements, 4)
    path = write(tmp_path / "a.jsonl", {"query": "q", "pos": ["a"]})
    assert_error(rf"a\.jsonl.*{config.name}", path, needs=config.row_requirements)
    examples, _ = read(path, needs=needs)
    assert [(e.positives.texts, e.negatives.texts) for e in examples] == [(("a",), ())]
    if config.name == "ranknet":
        path = write(tmp_path / "b.jsonl", {"query": "q", "pos": ["a"], "pos_scores": [0]})
        assert_error(r"b\.jsonl:1: loss=ranknet .* 0; data.on_error=skip", path, needs=needs)
        path = write(tmp_path / "c.jsonl", {**ROW, **SCORES})
        read(path, needs=config.row_requirements)
        assert_error(r"c\.jsonl:1: loss=ranknet .* from 0 .*not -1\.5", path, needs=needs)


def test_labels_that_a_loss_does_not_accept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {**ROW, **SCORES})
    assert_error(r"a\.jsonl:1: loss=bce needs scores .*0 to 1, not 9", path, needs=BCEConfig().row_requirements)
    assert_error(r"a\.jsonl:1: loss=lambdaloss .*0 to 32, not -1\.5", path, needs=LambdaLossConfig().row_requirements)
