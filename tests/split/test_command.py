"""`python -m embedtrain split`: nothing of the held-out set is in the training rows, and both sides can be read."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from embedtrain.commands.split import DevCorpus
from embedtrain.commands.split.writing import RowKeys, choose_held_out, file_names, open_sources, write_split
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.errors import ConfigError
from embedtrain.evaluation.sets import read_set
from embedtrain.evaluation.types import RetrievalSet
from tests.commands import call
from tests.data.files import read, write


def normalized(text: str) -> str:
    return " ".join(text.split()).casefold()


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows whose positives and negatives are shared, with differences in case and white space."""
    draw = random.Random(seed)

    def text(prefix: str, count: int) -> str:
        name = f"{prefix} {draw.randrange(count)}"
        return draw.choice([name, name.upper(), name.replace(" ", "  ")])

    return [
        {"query": text("q", 3 * count), "pos": [text("p", 2 * count)], "neg": [text("p", 2 * count), f"n{i}"]}
        for i in range(count)
    ]


def split(
    path: Path, output: Path, dev: int, corpus: DevCorpus = DevCorpus.held_out, seed: int = 42, **options: Any
) -> tuple[list[dict[str, Any]], RetrievalSet]:
    """The training rows and the held-out set."""
    sources = open_sources([TrainSource(path=str(path), **options)], OnError.stop, None)
    keys = RowKeys()
    for texts in sources[0].rows(OnError.stop):
        keys.add(texts)
    chosen = choose_held_out(keys, dev, seed)
    write_split(sources, chosen, keys, output, file_names(sources), OnError.stop, all_documents=corpus is DevCorpus.all)
    (file,) = output.glob("train.jsonl*")
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        train = [json.loads(line) for line in lines]
    data = read_set(EvaluationSet(path=str(output / "dev"))).data
    assert isinstance(data, RetrievalSet)
    return train, data


def all_texts(train: list[dict[str, Any]]) -> set[str]:
    return {normalized(text) for row in train for text in (row["query"], *row["pos"], *row["neg"])}


@pytest.mark.parametrize("seed", range(3))
def test_no_text_is_on_both_sides(tmp_path: Path, seed: int) -> None:
    source = rows(400, seed)
    train, data = split(write(tmp_path / "a.jsonl", *source), tmp_path / "out", 60, seed=seed)
    assert len(data.queries) == 60
    held_out = {normalized(text) for text in (*data.queries.values(), *data.documents.texts)}
    assert not held_out & all_texts(train)
    # No row is lost: each is on one side, with its positives.
    judged = {
        (normalized(data.queries[query]), normalized(data.documents.texts[data.documents.ids.index(document)]))
        for query, gains in data.judgements.items()
        for document, gain in gains.items()
        if gain > 0
    }
    written = judged | {(normalized(row["query"]), normalized(row["pos"][0])) for row in train}
    assert written == {(normalized(row["query"]), normalized(row["pos"][0])) for row in source}
    assert len(train) + sum(normalized(row["query"]) in held_out for row in source) == len(source)


def test_the_corpus_of_all_documents(tmp_path: Path) -> None:
    source = rows(200)
    train, data = split(write(tmp_path / "a.jsonl", *source), tmp_path / "out", 30, DevCorpus.all)
    documents = [normalized(text) for text in data.documents.texts]
    assert len(set(documents)) == len(documents)
    assert set(documents) == {normalized(text) for row in source for text in (*row["pos"], *row["neg"])}
    queries = {normalized(text) for text in data.queries.values()}
    assert not queries & all_texts(train)


def test_the_seed_decides_and_the_file_is_compressed_as_its_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", *rows(100))
    first, _ = split(path, tmp_path / "1", 10)
    assert [file.name for file in (tmp_path / "1").glob("train*")] == ["train.jsonl.gz"]
    split(path, tmp_path / "2", 10)
    assert (tmp_path / "1" / "train.jsonl.gz").read_bytes() == (tmp_path / "2" / "train.jsonl.gz").read_bytes()
    assert split(path, tmp_path / "3", 10, seed=1)[0] != first


def test_rows_keep_what_training_reads(tmp_path: Path) -> None:
    extra = {"pos_scores": [0.5], "neg_scores": [0.25, 0.125], "prompt": "find", "neg_id": ["x", "y"]}
    source = [{**row, **extra, "neg": [f"n{i}", f"m{i}"]} for i, row in enumerate(rows(50))]
    path = write(tmp_path / "a.jsonl", *source)
    train, _ = split(path, tmp_path / "out", 5)
    assert all({key: row[key] for key in extra} == extra for row in train)
    needs = RowRequirements(scores=ScoreRequirement.pairs, loss="cosent")
    before, after = (read(file, needs=needs)[0] for file in (path, tmp_path / "out" / "train.jsonl"))
    by_texts = {(example.query, example.positives.texts, example.negatives.texts): example for example in before}
    for example in after:
        original = by_texts[example.query, example.positives.texts, example.negatives.texts]
        assert (example.negatives.scores, example.instruction) == (original.negatives.scores, original.instruction)


def test_documents_by_id(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl", *({"_id": f"d{i}", "text": f"text {i}"} for i in range(20)))
    refs = [{"query": f"q{i}", "positive_document_ids": [f"d{i}"]} for i in range(20)]
    train, data = split(
        write(tmp_path / "rows.jsonl", *refs), tmp_path / "out", 4, documents=str(tmp_path / "corpus.jsonl")
    )
    assert len(train) == 16 and len(data.documents) == 4
    assert {row["pos"][0].split()[1] for row in train} == {row["query"][1:] for row in train}


def test_all_documents_of_a_corpus(tmp_path: Path) -> None:
    """Those that no row names are searched as well, and equal ones are one document."""
    write(tmp_path / "corpus.jsonl", *({"_id": f"d{i}", "text": f"text {min(i, 28)}"} for i in range(30)))
    refs = [{"query": f"q{i}", "positive_document_ids": [f"d{i}"]} for i in range(20)]
    path = write(tmp_path / "rows.jsonl", *refs)
    train, data = split(path, tmp_path / "out", 4, DevCorpus.all, documents=str(tmp_path / "corpus.jsonl"))
    assert len(train) == 16
    assert sorted(data.documents.texts) == sorted(f"text {i}" for i in range(29))


def test_rows_that_all_share_a_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"query": f"q{i}", "pos": ["p" if i < 8 else f"p{i}"]} for i in range(10)))
    assert len(split(path, tmp_path / "out", 2)[0]) == 8
    with pytest.raises(ConfigError, match=r"dev=5: .* 2 of 10 .*8 queries.*dev=2"):
        split(path, tmp_path / "other", 5)
    with pytest.raises(ConfigError, match=r"dev=10: .*10 distinct queries"):
        split(path, tmp_path / "other", 10)
    assert not (tmp_path / "other").exists()


def test_the_command(tmp_path: Path) -> None:
    table = tmp_path / "faq.csv"
    table.write_text("id,answer,question\n" + "".join(f"{i},answer {i},question {i}\n" for i in range(50)))
    options = (
        "split",
        f"data=[{{path: {table}, query_prompt: 'Q: '}}]",
        "dev=10",
        f"output_dir={tmp_path}/out",
    )
    output = call(*options)
    for expected in ("question = query", "10 queries (10 rows)", "40 queries (40 rows)", "not used: id"):
        assert expected in output
    train = f'{{path: {tmp_path}/out/train.jsonl, query_prompt: "Q: "}}'
    assert f"embedtrain train recipe=NAME 'data.train=[{train}]' 'evaluation.sets=[{tmp_path}/out/dev]'" in output
    before = (tmp_path / "out" / "train.jsonl").read_bytes()
    assert f"{tmp_path}/out/train.jsonl exists" in call(*options, code=1)
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == before
    assert "data=[]" in call("split", f"output_dir={tmp_path}/x", code=1)


def test_a_group_of_half_of_the_queries_is_said_to_stay_in_training(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"query": f"q{i}", "pos": ["p" if i < 8 else f"p{i}"]} for i in range(12)))
    output = call("split", f"data=[{path}]", "dev=2", f"output_dir={tmp_path}/out")
    assert "8 of 12 queries are linked by equal texts: all of them stay in training" in output
    assert "the held-out queries come from the other 4" in output


def test_sources_whose_names_end_alike_have_files_of_their_own(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, *rows(20, seed)) for seed, name in enumerate(("web/qa.jsonl", "news/qa.jsonl"))]
    named = write(tmp_path / "other.jsonl", *rows(20, 2))
    given = [*(TrainSource(path=str(path)) for path in paths), TrainSource(path=str(named), name="web-qa")]
    sources = open_sources(given, OnError.stop, None)
    names = file_names(sources)
    assert names == ["train-web-qa.jsonl", "train-news-qa.jsonl", "train-web-qa-2.jsonl"]
    keys = RowKeys()
    for source in sources:
        for texts in source.rows(OnError.stop):
            keys.add(texts)
    counts = write_split(
        sources, choose_held_out(keys, 6, 42), keys, tmp_path / "out", names, OnError.stop, all_documents=False
    )
    written = [len((tmp_path / "out" / name).read_text().splitlines()) for name in names]
    assert written == counts.train_rows
    assert sum(written) + counts.dev_rows == 60
