"""Layouts of training rows: recognised from the first usable row, read as their authors mean them."""

import json
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.losses import CoSENTConfig, DistillScoresConfig
from embedtrain.config.recipe import DataFormat, OnError
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.rows import Example
from embedtrain.errors import ConfigError
from tests.data.files import assert_error, error_of, read, write, write_table

PAIRS = CoSENTConfig().row_requirements
TEACHER = DistillScoresConfig().row_requirements
CLASSES = RowRequirements(documents=False, label=True, loss="batch_triplet")

ROW = {"query": "q", "pos": ["p"], "neg": ["n", "m"]}


def only(path: Path, row: dict[str, Any], **options: Any) -> Example:
    """What a file of one row gives."""
    (example,), _ = read(write(path / "a.jsonl", row), **options)
    return example


def bad(path: Path, row: dict[str, Any], **options: Any) -> str:
    """The problem of a row, without its location."""
    file = write(path / "x.jsonl", row)
    error = error_of(file, **options)
    assert error.startswith(f"{file}:1: ")
    return error.removeprefix(f"{file}:1: ")


# FlagEmbedding's own files


FLAG_FILES = [
    "embedder/classification-no_in_batch_neg/AmazonClassification.jsonl",
    "embedder/classification-no_in_batch_neg/Banking77Classification.jsonl",
    "embedder/clustering-no_in_batch_neg/arXiv_title.jsonl",
    "embedder/clustering-no_in_batch_neg/bioRXiv_title.jsonl",
    "embedder/retrieval/msmarco.jsonl",
    "embedder/retrieval/nli.jsonl",
    "embedder/retrieval/nq.jsonl",
    "embedder/sts/sts.jsonl",
    "llara/finetune/toy_finetune_data.jsonl",
    "reranker/normal/examples.jsonl",
    "reranker/prompt_based/examples.jsonl",
]


@pytest.mark.parametrize("name", FLAG_FILES)
def test_files_of_flagembedding(shared_data: Path, name: str) -> None:
    path = shared_data / "flagembedding-examples" / name
    rows = [json.loads(text) for text in path.open(encoding="utf-8")]
    examples, report = read(path)
    assert len(examples) == len(rows)
    for example, row in zip(examples, rows, strict=True):
        assert (example.query, list(example.positives.texts)) == (row["query"], row["pos"])
        assert list(example.negatives.texts) == [n for n in dict.fromkeys(row["neg"]) if n not in row["pos"]]
        assert example.instruction == row.get("prompt")
        is_symmetric = row.get("type") in ("symmetric_sts", "symmetric_clustering")
        assert example.document_instruction == (row["prompt"] if is_symmetric else None)
        assert example.max_negatives == (1 if row.get("type") == "only_1neg" else None)
    ignored = {"category"} if "category" in rows[0] else set()
    ignored |= {"pos_scores", "neg_scores"} & rows[0].keys()
    assert set(report.rows.ignored) == ignored
    if "pos_scores" in rows[0]:
        scored, report = read(path, needs=TEACHER)
        assert [list(e.positives.scores) for e in scored] == [pytest.approx(row["pos_scores"]) for row in rows]
        assert "scores" in report.layout
    else:
        assert 'this row has no "pos_scores"' in error_of(path, needs=TEACHER)


def test_pretraining_rows_of_flagembedding_are_rejected(shared_data: Path) -> None:
    path = shared_data / "flagembedding-examples" / "llara" / "pretrain"
    assert_error(f"^{path}: .*LLARA.*input, output_", path)


def test_prompt_and_type(tmp_path: Path) -> None:
    example = only(tmp_path, {**ROW, "prompt": "", "type": "symmetric_sts"})
    assert (example.instruction, example.document_instruction, example.max_negatives) == ("", "", None)
    assert only(tmp_path, {**ROW, "prompt": None}).instruction is None
    assert only(tmp_path, {**ROW, "prompt_for_query": "find"}).instruction == "find"
    _, report = read(write(tmp_path / "a.jsonl", {**ROW, "type": "odd", "prompt": "x"}, {**ROW, "type": "only_1neg"}))
    assert report.layout == "FlagEmbedding rows with instructions and one negative used (only_1neg)"
    assert report.rows.ignored == ["type odd"]
    _, report = read(write(tmp_path / "a.jsonl", {**ROW, "type": "symmetric_sts"}))
    assert report.rows.ignored == ["type symmetric_sts (of rows without a prompt)"]
    assert '"prompt" must be a text, not a number (3)' in bad(tmp_path, {**ROW, "prompt": 3})
    assert "another instruction" in bad(tmp_path, {**ROW, "prompt": "a", "prompt_for_query": "b"})


def test_scores_of_pairs_in_one_list(tmp_path: Path) -> None:
    row = {"query": "q", "pos": ["a", "b"], "scores": [1, 0.25]}
    assert only(tmp_path, row, needs=PAIRS).positives.scores == (1.0, 0.25)
    both = only(tmp_path, {**row, "neg": ["c"], "scores": [1, 0.5, 0]}, needs=TEACHER)
    assert (both.positives.scores, both.negatives.scores) == ((1.0, 0.5), (0.0,))
    assert '"scores" has 1 element and "pos" has 2 texts' in bad(tmp_path, {**row, "scores": [1]}, needs=PAIRS)
    path = write(tmp_path / "a.jsonl", row)
    assert error_of(path).startswith(f'{path}: "scores" makes these scored pairs, which loss=infonce does not use')
    assert read(path, columns=["query", "pos"])[0][0].positives.texts == ("a", "b")


def test_a_single_score_beside_lists_is_refused_by_losses_of_scores(tmp_path: Path) -> None:
    """It would be left out in silence, and every pair count 1. A list is of `filter annotate=true`."""
    row = {"query": "q", "pos": ["a"], "score": 0.5}
    path = write(tmp_path / "a.jsonl", row)
    for needs in (PAIRS, TEACHER):
        assert '"score" is not what scores of rows with "pos" and "neg" are called' in error_of(path, needs=needs)
    assert only(tmp_path, row).positives.texts == ("a",)
    assert only(tmp_path, {**row, "pos_scores": [0.25]}, needs=PAIRS).positives.scores == (0.25,)
    assert only(tmp_path, {**row, "neg": ["n"], "score": [0.5]}, needs=PAIRS).positives.scores == (1.0,)


def test_texts_with_instructions(tmp_path: Path) -> None:
    gritlm = {"query": ["find", "q"], "pos": [["", "p"]], "neg": [["", "n"], ["", "m"]]}
    example = only(tmp_path, gritlm)
    assert (example.query, example.positives.texts, example.negatives.texts) == ("q", ("p",), ("n", "m"))
    assert (example.instruction, example.document_instruction) == ("find", "")
    e5 = only(tmp_path, {"query": ["find", "q"], "pos": ["p", "o"], "neg": ["n"]})
    assert (e5.instruction, e5.document_instruction, e5.positives.texts) == ("find", None, ("p", "o"))
    medi = {"query": ["ask", "q"], "pos": ["look", "p"], "neg": ["look", "n"], "task_id": 3}
    example = only(tmp_path, medi)
    assert (example.query, example.positives.texts, example.negatives.texts) == ("q", ("p",), ("n",))
    assert (example.instruction, example.document_instruction) == ("ask", "look")
    _, report = read(write(tmp_path / "a.jsonl", medi))
    assert str(report).startswith("a: FlagEmbedding rows with instructions, 1 rows")
    assert "are two texts each" in bad(tmp_path, {**medi, "neg": ["other", "n"]})
    mixed = {"query": ["", "q"], "pos": [["x", "p"]], "neg": [["y", "n"]]}
    assert "different instructions, 'x' and 'y'" in bad(tmp_path, mixed)
    assert "different instructions, 'x' and none" in bad(tmp_path, {**mixed, "neg": ["n"]})
    assert "different instructions, '' and none" in bad(tmp_path, {**mixed, "pos": ["p"], "neg": [["", "n"]]})


def test_two_texts_in_a_list_are_an_instruction_only_where_the_query_has_one(tmp_path: Path) -> None:
    """Two paraphrases in brackets too many would else lose the first in silence."""
    for key in ("pos", "neg"):
        row = {**ROW, key: ["a", ["x", "y"]]}
        assert f'element 2 of "{key}" is a list inside a list' in bad(tmp_path, row)
    assert only(tmp_path, {**ROW, "query": ["", "q"], "pos": [["x", "y"]], "neg": [["x", "z"]]}).positives.texts == (
        "y",
    )


def test_gritlm_rows_without_a_query(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "g.jsonl", {"text": ["ask", "answer"]}))
    assert "gritlm's generative rows" in error


def test_the_first_row_determines_the_layout(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, {"query": "q", "passage": "p"})
    assert error_of(path).startswith(f'{path}:2: no "pos" in this row')
    path = write(tmp_path / "b.jsonl", {"error": "slow down"}, ROW)
    assert_error(f"^{path}: rows need a query and a positive.*error$", path)
    examples, report = read(path, OnError.skip)
    assert [e.location.line for e in examples] == [2]
    assert f'1 bad rows skipped ({path}:1: no "query" in this row, which has: error)' in str(report)


# Tevatron


def passage(number: int, title: str | None = None) -> dict[str, Any]:
    return {"docid": f"d{number}", "title": title, "text": f"text {number}"}


def test_tevatron_passages(tmp_path: Path) -> None:
    row = {
        "query_id": "7",
        "query": "q",
        "positive_passages": [passage(1, "Title")],
        "negative_passages": [passage(2), passage(3, ""), passage(2)],
    }
    (example,), report = read(write(tmp_path / "a.jsonl", row))
    assert example.positives.texts == ("Title text 1",)
    assert example.negatives.texts == ("text 2", "text 3")
    assert (example.positives.ids, example.negatives.ids) == (("d1",), ("d2", "d3"))
    assert str(report).startswith("a: Tevatron passages with ids, 1 rows")
    assert report.rows.ignored == ["query_id"]
    assert only(tmp_path, {**row, "negative_passages": None}, format=DataFormat.tevatron).negatives.texts == ()
    parquet = write_table(tmp_path / "a.parquet", {key: [value] for key, value in row.items()})
    assert read(parquet)[0][0].positives.texts == ("Title text 1",)
    assert "is empty: a row needs" in bad(tmp_path, {**row, "positive_passages": []})
    assert 'element 1 of "positive_passages" must be an object' in bad(tmp_path, {**row, "positive_passages": ["p"]})
    assert "is an empty text" in bad(tmp_path, {**row, "positive_passages": [{"docid": 1, "text": " "}]})
    assert '"text" of element 1' in bad(tmp_path, {**row, "positive_passages": [{"docid": 1, "text": 4}]})
    image = {**row, "positive_passages": [{**passage(1), "image": "a.png"}]}
    assert "names 'a.png', and it does not exist" in bad(tmp_path, image)
    error = error_of(write(tmp_path / "a.jsonl", row), needs=TEACHER)
    assert "needs a teacher's score of every document, which Tevatron passages do not hold" in error
    assert "needs the class of every row" in error_of(tmp_path / "a.jsonl", needs=CLASSES)
    with pytest.raises(ConfigError, match=r"columns .*format=tevatron"):
        read(tmp_path / "a.jsonl", columns=["query", "x"], format=DataFormat.tevatron)


CORPUS = [
    {"docid": "a", "title": "About", "text": "apples"},
    {"_id": 2, "text": "pears"},
    {"id": "c", "document_text": "plums", "image": None},
    {"docid": "empty", "text": ""},
]
BY_ID = {"query_id": 1, "query_text": "q", "query_image": None, "positive_document_ids": ["a"]}


@pytest.mark.parametrize("where", ["beside", "folder", "option", "shards"])
def test_tevatron_ids_of_a_corpus(tmp_path: Path, where: str) -> None:
    rows = write(tmp_path / "data" / "train.jsonl", {**BY_ID, "negative_document_ids": [2, "c"]})
    options: dict[str, Any] = {}
    match where:
        case "beside":
            write(tmp_path / "data" / "corpus.jsonl.gz", *CORPUS)
        case "folder":
            write(tmp_path / "data" / "corpus" / "all.jsonl", *CORPUS)
        case "shards":
            write(tmp_path / "data" / "corpus-1.jsonl", *CORPUS[:2])
            write(tmp_path / "data" / "corpus-2.jsonl", *CORPUS[2:])
        case "option":
            options["documents"] = str(write(tmp_path / "texts.jsonl", *CORPUS))
    for path in (rows, rows.parent):
        (example,), report = read(path, **options)
        assert (example.query, example.positives.texts, example.negatives.texts) == (
            "q",
            ("About apples",),
            ("pears", "plums"),
        )
        assert (example.positives.ids, example.negatives.ids) == (("a",), ("2", "c"))
        assert report.layout == "Tevatron rows with ids of documents of a corpus"
        assert report.rows.ignored == ["query_id"]


def test_unknown_document_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", BY_ID)
    assert f"data.train=[{{path: {path}, documents: FILE}}]" in error_of(path)
    write(tmp_path / "corpus.jsonl", *CORPUS)
    for ids, what in (
        (["zz"], '"positive_document_ids" names "zz", and the corpus has no such document'),
        (["empty"], '"positive_document_ids" names "empty", and that document has no text'),
        ([], '"positive_document_ids" is empty'),
        ("a", '"positive_document_ids" must be a list of ids'),
        ([""], 'element 1 of "positive_document_ids" is empty'),
    ):
        write(path, BY_ID, {**BY_ID, "positive_document_ids": ids})
        assert error_of(path).startswith(f"{path}:2: {what}")
        assert len(read(path, OnError.skip)[0]) == 1
    assert "names 'x.png', and it does not exist" in bad(tmp_path, {**BY_ID, "query_image": "x.png"})
    plain = write(tmp_path / "plain.jsonl", ROW)
    assert "has no use: rows hold their documents' texts themselves" in error_of(
        plain, ConfigError, documents=str(tmp_path / "corpus.jsonl")
    )
    assert len(read(plain)[0]) == 1  # a corpus beside rows that hold their texts


def test_a_bad_row_before_those_with_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"error": "slow down"}, BY_ID)
    write(tmp_path / "corpus.jsonl", *CORPUS)
    examples, report = read(path, OnError.skip)
    assert [e.positives.texts for e in examples] == [("About apples",)]
    assert f'{path}:1: no "query_text" in this row' in str(report)
    late = write(
        tmp_path / "late.jsonl", *[{"question": "q", "pos_doc": "p"}] * 20, {"question": "q", "pos_doc": [{"id": "a"}]}
    )
    assert error_of(late).startswith(f'{late}:21: "pos_doc" names documents by id, and the source\'s first rows do not')


def test_broken_corpora(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", BY_ID)
    corpus = tmp_path / "corpus.jsonl"
    for row, what in (
        ({"text": "x"}, 'a document needs an id ("docid" or "_id"), and this one has: text'),
        ({"docid": "x"}, 'a document needs a "text" or an "image", and this one has: docid'),
        ({"docid": "x", "text": 3}, '"text" must be a text, not a number (3)'),
        ({"docid": None, "text": "x"}, '"docid" is empty, and a document needs an id'),
    ):
        write(corpus, *CORPUS, row)
        assert error_of(tmp_path / "train.jsonl").startswith(f"{corpus}:5: {what}")


# ms-swift


def message(*contents: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": content} for content in contents]


CONVERSATION = {
    "messages": message("q"),
    "positive_messages": [message("p")],
    "negative_messages": [message("n"), message("m")],
}


def test_messages(tmp_path: Path) -> None:
    (example,), report = read(write(tmp_path / "a.jsonl", CONVERSATION))
    assert (example.query, example.positives.texts, example.negatives.texts) == ("q", ("p",), ("n", "m"))
    assert (example.instruction, example.document_instruction) == (None, None)
    assert str(report).startswith("a: messages (ms-swift), 1 rows")
    system = message("be brief", role="system")
    longer = {
        "messages": [*system, *message("q"), *message("so", role="assistant")],
        "positive_messages": [[*message("as", role="system"), *message("p")]],
    }
    example = only(tmp_path, longer)
    assert (example.query, example.instruction, example.document_instruction) == ("q\nso", "be brief", "as")
    assert only(tmp_path, {**CONVERSATION, "positive_messages": [message("p"), message("o")]}).positives.texts == (
        "p",
        "o",
    )
    parts = {**CONVERSATION, "messages": [{"role": "user", "content": [{"type": "text", "text": "q2"}]}]}
    assert only(tmp_path, parts).query == "q2"
    parquet = write_table(tmp_path / "a.parquet", {key: [value] for key, value in CONVERSATION.items()})
    assert read(parquet)[0][0].negatives.texts == ("n", "m")


def test_scores_of_messages(tmp_path: Path) -> None:
    pair = {key: CONVERSATION[key] for key in ("messages", "positive_messages")}
    assert only(tmp_path, {**pair, "label": 0.5}, needs=PAIRS).positives.scores == (0.5,)
    assert only(tmp_path, {**pair, "score": 1}).positives.scores == ()
    assert '"label" is a number (0.5): loss=infonce does not use' in bad(tmp_path, {**pair, "label": 0.5})
    assert 'needs scores, and this row has no "label"' in bad(tmp_path, pair, needs=TEACHER)


BAD_CONVERSATIONS = {
    'no "positive_messages" in this row': {"messages": message("q"), "negative_messages": [message("n")]},
    '"messages" must be a list of messages, not a text': {**CONVERSATION, "messages": "q"},
    '"messages" must be a list of messages, not empty': {**CONVERSATION, "messages": []},
    '"positive_messages" is empty': {**CONVERSATION, "positive_messages": []},
    'element 1 of "positive_messages" must be a list of messages': {**CONVERSATION, "positive_messages": message("p")},
    'message 1 of "messages" must be an object with "role" and "content"': {**CONVERSATION, "messages": ["q"]},
    "message 2 of \"messages\" has the role a text ('system')": {
        **CONVERSATION,
        "messages": [*message("q"), *message("s", role="system")],
    },
    '"messages" has no message besides the system message': {**CONVERSATION, "messages": message("s", role="system")},
    '"content" of message 1 of "messages" is an empty text': {**CONVERSATION, "messages": message("")},
    "the documents of this row have different system messages": {
        **CONVERSATION,
        "positive_messages": [[*message("s", role="system"), *message("p")]],
    },
    "only texts and pictures": {**CONVERSATION, "messages": [{"role": "user", "content": [{"type": "video"}]}]},
    'this row has "videos": only texts and pictures': {**CONVERSATION, "videos": ["a.mp4"]},
    "names 'a.png', and it does not exist": {**CONVERSATION, "images": ["a.png"]},
}


@pytest.mark.parametrize(("message", "row"), BAD_CONVERSATIONS.items(), ids=list(BAD_CONVERSATIONS))
def test_bad_messages(tmp_path: Path, message: str, row: dict[str, Any]) -> None:
    assert message in bad(tmp_path, row)


def test_conversations_without_documents(tmp_path: Path) -> None:
    assert 'conversations without "positive_messages"' in error_of(
        write(tmp_path / "a.jsonl", {"messages": message("q")})
    )


# NeMo, and sentence-transformers' mined negatives


def test_nemo_rows(tmp_path: Path) -> None:
    row = {"question": "q", "pos_doc": "p", "neg_doc": ["n", "m"]}
    (example,), report = read(write(tmp_path / "a.jsonl", row))
    assert (example.query, example.positives.texts, example.negatives.texts) == ("q", ("p",), ("n", "m"))
    assert str(report).startswith("a: NeMo rows, 1 rows")
    example = only(tmp_path, {"query": "q", "pos_doc": [{"id": 1, "text": "p"}], "neg_doc": [{"text": "n"}]})
    assert (example.positives.texts, example.negatives.texts, example.positives.ids) == (("p",), ("n",), ("1",))
    write(tmp_path / "corpus.jsonl", *CORPUS)
    example = only(tmp_path, {"question": "q", "pos_doc": [{"id": "a"}], "neg_doc": [{"id": 2}]})
    assert (example.positives.texts, example.negatives.texts, example.negatives.ids) == (
        ("About apples",),
        ("pears",),
        ("2",),
    )
    assert '"pos_doc" is empty' in bad(tmp_path, {**row, "pos_doc": []})


def test_mined_negatives_marked_in_a_list(tmp_path: Path) -> None:
    row = {"query": "q", "answer": ["a", "b", "c"], "labels": [1, 0, 0]}
    (example,), report = read(write(tmp_path / "a.jsonl", row))
    assert (example.positives.texts, example.negatives.texts) == (("a",), ("b", "c"))
    assert str(report).startswith(
        "a: columns query = query, answer = positive, labels = 1 for positives, 0 for negatives (by name; "
    )
    assert only(tmp_path, row, needs=PAIRS).positives.scores == (1.0, 0.0, 0.0)
    path = write(tmp_path / "b.jsonl", row, {**row, "labels": [0, 0, 0]}, {**row, "labels": [0.5, 0, 0]})
    assert_error(f'^{path}:2: column "labels" marks no document', path)
    _, report = read(path, OnError.skip)
    assert 'element 1 of column "labels" must be 1 for a positive or 0 for a negative, not 0.5' in str(report)


# BEIR


def beir(folder: Path, judgements: list[str], split: str = "train") -> Path:
    write(folder / "corpus.jsonl", *({"_id": f"d{i}", "title": "T", "text": f"text {i}"} for i in range(5)))
    write(folder / "queries.jsonl", *({"_id": f"q{i}", "text": f"query {i}"} for i in range(4)))
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / f"{split}.tsv").write_text("".join(f"{text}\n".replace(" ", "\t") for text in judgements))
    return folder


HEADER = "query-id corpus-id score"


def test_a_beir_folder(tmp_path: Path) -> None:
    folder = beir(tmp_path / "b", [HEADER, "q2 d0 1", "q0 d1 1", "q2 d3 0", "q0 d2 2", "q2 d0 1"])
    examples, report = read(folder)
    assert [(e.query, e.positives.texts, e.negatives.texts, e.location.line) for e in examples] == [
        ("query 2", ("T text 0",), ("T text 3",), 2),
        ("query 0", ("T text 1", "T text 2"), (), 3),
    ]
    assert examples[1].positives.ids == ("d1", "d2")
    assert examples[0].location.file == str(folder / "qrels" / "train.tsv")
    assert "BEIR's judged queries, documents above 0 = positives, others that are judged = hard negatives" in str(
        report
    )
    assert read(folder, format=DataFormat.beir)[0] == examples
    scored, _ = read(folder, needs=PAIRS)
    assert [(e.positives.scores, e.negatives.scores) for e in scored] == [((1.0,), (0.0,)), ((1.0, 2.0), ())]
    beir(folder, ["score corpus-id query-id", "1 d0 q2", "1 d1 q0", "0 d3 q2", "2 d2 q0", "1 d0 q2"])
    assert read(folder)[0] == examples
    beir(folder, ["q1 d1 1"], "dev")
    assert [(e.query, e.location.line) for e in read(folder, split="dev")[0]] == [("query 1", 1)]  # without a header
    assert_error(f"^{folder}: .*split=test, only of dev, train", folder, split="test")


@pytest.mark.parametrize("name", ["train.qrels", "train.txt", "train.tsv"])
def test_a_beir_folder_with_judgements_of_trec(tmp_path: Path, name: str) -> None:
    expected, _ = read(beir(tmp_path / "a", [HEADER, "q2 d0 1", "q2 d3 0"]))
    folder = beir(tmp_path / "b", [])
    (folder / "qrels" / "train.tsv").unlink()
    (folder / "qrels" / name).write_text("q2 0 d0 1\nq2 0 d3 0\n")
    (example,), _ = read(folder)
    assert (example.query, example.positives.texts, example.negatives.texts) == (
        expected[0].query,
        expected[0].positives.texts,
        expected[0].negatives.texts,
    )


BAD_JUDGEMENTS = {
    "q3 d0 0": 'query "q3" has no document with a score above 0',
    "q9 d0 1": 'query "q9" is not in ',
    "q3 d9 1": 'the judgement names "d9", and the corpus has no such document',
    "q3 d1": "2 fields",
    "q3 d1 x": "score must be a number, not a text ('x')",
    " d1 1": "query-id is empty",
}


@pytest.mark.parametrize(("line", "message"), BAD_JUDGEMENTS.items())
def test_bad_judgements(tmp_path: Path, line: str, message: str) -> None:
    folder = beir(tmp_path / "b", [HEADER, "q1 d1 1", line, "q2 d2 1"])
    error = error_of(folder)
    assert error.startswith(f"{folder}/qrels/train.tsv:3: {message}")
    assert [e.location.line for e in read(folder, OnError.skip)[0]] == [2, 4]


def test_broken_beir_folders(tmp_path: Path) -> None:
    folder = beir(tmp_path / "b", [HEADER, "q1 d1 1", "q1 d1 0"])
    assert 'document "d1" is judged 1 and 0 for query "q1"' in error_of(folder)
    write(folder / "queries.jsonl", {"_id": "q1", "text": "a"}, {"_id": "q1", "text": "b"})
    assert_error(f'^{folder}/queries.jsonl: .*"q1"', folder)
    write(folder / "queries.jsonl", {"_id": "q1"})
    assert error_of(folder).startswith(f'{folder}/queries.jsonl:1: a query needs "_id" and "text"')
    write(folder / "queries.jsonl.gz", {"_id": "q1", "text": "a"})
    assert "queries.jsonl.gz are both called queries" in error_of(folder)
    (folder / "queries.jsonl").unlink()
    (folder / "queries.jsonl.gz").unlink()
    assert_error(f"^{folder}: format=beir.*no queries.jsonl", folder, format=DataFormat.beir)
    with pytest.raises(ConfigError, match="format=beir is a folder's"):
        read(folder / "corpus.jsonl", format=DataFormat.beir)


def test_a_retrieval_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    tables = {
        "corpus": {"_id": ["d1", "d2"], "title": ["T", ""], "text": ["one", "two"]},
        "queries": {"_id": ["q1"], "text": ["query"]},
        "qrels": {"query-id": ["q1", "q1"], "corpus-id": ["d2", "d1"], "score": [1, 0]},
    }
    card = ["---", "configs:"]
    for name, table in tables.items():
        write_table(folder / f"{name}.parquet", table)
        split = "dev" if name == "qrels" else name
        card.append(f"- {{config_name: {name}, data_files: [{{split: {split}, path: {name}.parquet}}]}}")
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    (example,), report = read(folder, format=DataFormat.beir, split="dev")
    assert (example.query, example.positives.texts, example.negatives.texts) == ("query", ("two",), ("T one",))
    assert (example.positives.ids, example.location.line) == (("d2",), 1)
    assert "BEIR's judged queries" in str(report)
    assert "no split 'train', only dev" in error_of(folder, format=DataFormat.beir)


def test_a_real_beir_folder(shared_data: Path) -> None:
    folder = shared_data / "cmrc2018"
    examples, report = read(folder, split="test")
    judged = [text.split("\t") for text in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]]
    assert len(examples) == len({query for query, _, _ in judged}) > 3000
    by_query: dict[str, list[str]] = {}
    for query, document, _ in judged:
        by_query.setdefault(query, []).append(document)
    assert [list(e.positives.ids) for e in examples] == list(by_query.values())
    assert "no negatives" in str(report)
