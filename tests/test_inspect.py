"""The inspect command: what it counts is what a plain loop over the rows counts, and its exit code can be relied on."""

import gzip
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from embedtrain.commands.inspect.sources import (
    Overlap,
    Repetition,
    RowKeys,
    duplicates_in,
    first_bad_rows,
    overlaps,
    summarise_extra_columns,
)
from embedtrain.commands.inspect.texts import (
    ROLES,
    UntruncatedTokenizer,
    batch_cost,
    join_statistics,
    measure,
    shown_texts,
)
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import load_train_data
from embedtrain.evaluation.types import ClusteringSet, Corpus, RetrievalSet, ScoredPairs
from embedtrain.kinds.cross_encoder.model import PairFormat, PairLayout
from embedtrain.kinds.sparse.model import StaticQueryLayout
from embedtrain.tracking.pages import escape_control, shorten_middle
from tests.commands import ENVIRONMENT, call
from tests.data.files import write
from tests.evaluation.files import beir
from tests.small import save_small, small_model, small_tokenizer, text

BAD = [b'{"query": 7, "pos": ["a"]}\n', b'{"query": "a", "pos": []}\n', b'{"query": "cut', b'{"pos": ["b"]}\n']


def rows(count: int) -> list[dict]:
    """Queries in pairs, and every fifth row's negative is the row's positive before it."""
    built = []
    for i in range(count):
        negatives = [text(300 + i, 3 + i % 40)] if i % 2 else []
        if i % 5 == 4:
            negatives.append(built[-1]["pos"][0])
        built.append(
            {"query": text(i // 2, 2 + i // 2 % 3), "pos": [f"{text(100 + i, 4 + i % 50)} {i}"], "neg": negatives}
        )
    return built


def load(path: Path, folder: Path, *, needs: RowRequirements | None = None, **options):
    cache = Cache(directory=folder / "cache")
    source = TrainSource(path=str(path), **options)
    data = load_train_data([source], seed=0, global_batch_size=8, needs=needs or RowRequirements(), cache=cache)
    return data, cache


def test_lengths_and_duplicates_are_those_of_a_plain_loop(tmp_path):
    written = rows(60)
    tokenizer = TextTokenizer(small_tokenizer(), 24)
    assert tokenizer.tokenizer.unk_token_id is not None
    uncut = UntruncatedTokenizer(tokenizer)
    texts = {
        "queries": [f"alpha {row['query']}" for row in written],
        "positives": [text for row in written for text in row["pos"]],
        "negatives": [text for row in written for text in row["neg"]],
    }
    path = write(tmp_path / "rows.jsonl", *written)
    data, cache = load(path, tmp_path, query_prompt="alpha ", query_max_length=5)
    data.prepare(tokenizer, cache)
    actual = measure(data.stores[0], data.tokens[0], data.settings[0].text_format, uncut)
    for role, limit in zip(ROLES, (5, 24, 24), strict=True):
        whole = sorted(len(uncut.tokenizer(one)["input_ids"]) for one in texts[role])
        lengths = actual.lengths[role]
        assert sorted(lengths.values.tolist()) == whole
        assert (lengths.limit, lengths.num_truncated) == (limit, sum(length > limit for length in whole))
        assert lengths.is_exact
    kept = [ids for role, most in zip(ROLES, (5, 24, 24), strict=True) for ids in tokenizer.ids(texts[role], most)]
    unknown = sum(ids.count(tokenizer.tokenizer.unk_token_id) for ids in kept)
    assert (actual.num_tokens, actual.num_unknown) == (sum(map(len, kept)), unknown)
    duplicates = duplicates_in(actual.keys)
    assert duplicates.queries == Repetition(30, 60)
    assert duplicates.both == 12
    assert duplicates.contradictions == 6  # of equal queries, next to one another
    characters = measure(data.stores[0], None, data.settings[0].text_format, None)
    assert characters.lengths["positives"].values.tolist() == [len(one) for one in texts["positives"]]
    assert (characters.keys.negatives == actual.keys.negatives).all()
    both = join_statistics([actual, actual])
    assert both.lengths["queries"].num_texts == 120
    assert duplicates_in(both.keys).rows == Repetition(60, 120)


def test_of_very_many_texts_a_sample_is_tokenised_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("embedtrain.commands.inspect.texts.MAX_SAMPLED_TEXTS", 80)
    tokenizer = TextTokenizer(small_tokenizer(), 12)
    path = write(tmp_path / "rows.jsonl", *rows(100))
    data, cache = load(path, tmp_path)
    data.prepare(tokenizer, cache)
    actual = measure(data.stores[0], data.tokens[0], data.settings[0].text_format, UntruncatedTokenizer(tokenizer))
    lengths = actual.lengths["positives"]
    assert not lengths.is_exact
    assert (lengths.num_texts, len(lengths.values)) == (100, 100)
    share = lengths.num_truncated / len(lengths.values)
    assert share == pytest.approx(0.88, abs=0.15)  # those of more than 9 words, with a number, <s> and </s>
    assert len(actual.keys.positives) == 100


def test_rows_are_equal_whatever_the_order_of_their_negatives_and_contradictions_are_detected():
    def keys(*rows: tuple[int, list[int], list[int]]) -> RowKeys:
        queries, positives, negatives = zip(*rows, strict=True)
        counts = [np.array([len(texts) for texts in role]) for role in (positives, negatives)]
        flat = [np.array([text for texts in role for text in texts], dtype=np.int64) for role in (positives, negatives)]
        return RowKeys(np.array(queries, dtype=np.int64), *flat, *counts)

    actual = duplicates_in(
        keys((1, [10], [20, 30]), (1, [10], [30, 20]), (2, [20], [10, 30]), (2, [30], [20]), (3, [5], []))
    )
    assert actual.rows == Repetition(1, 2)
    assert actual.queries == Repetition(2, 4)
    assert actual.positives == Repetition(1, 2)
    assert actual.both == 3
    assert actual.contradictions == 2  # of query 2: text 20, and text 30
    assert duplicates_in(keys((1, [10], []), (2, [20], []))).both == 0


def test_texts_of_evaluation_sets_are_found_among_the_rows(tmp_path):
    """Of every kind of set: queries and relevant documents, whatever their case and the spaces around them."""
    one, two = ({"query": f"Question {i}", "pos": [f"answer {i}", f"more {i}"], "neg": ["else"]} for i in (1, 2))
    stores = [load(write(tmp_path / f"{i}.jsonl", row), tmp_path)[0].stores[0] for i, row in enumerate((one, two, two))]
    documents = Corpus.from_dict({"a": "MORE 2", "b": "answer 1", "c": "answer 3", "d": "else"})
    queries = {"1": " question 2\n", "2": "question 1", "3": "question 3", "4": "question 3"}
    judgements = {"1": {"a": 1, "b": 0}, "3": {"c": 2, "d": 1}, "4": {"c": 1}}
    sets = [
        RetrievalSet("search", queries, documents, judgements),
        ScoredPairs("pairs", ["answer 1", "x"], ["Answer 2", "answer 1"], [0.0, 1.0]),
        ClusteringSet("groups", ["question 1", "question 9", "else"], [["a"], ["b"], ["b"]]),
    ]
    actual = overlaps(sets, stores)
    assert actual == [Overlap("search", 2, 1, 3, 1), Overlap("pairs", 2, 1, 2, 2), Overlap("groups", 3, 1, 0, 0)]


def test_extra_columns_are_counted(tmp_path):
    written = [
        {"query": f"q{i}", "pos": ["p"], "neg": ["n"], "pos_scores": [i], "neg_scores": [-i], "prompt": f"do {i % 2}"}
        for i in range(1, 6)
    ]
    path = write(tmp_path / "rows.jsonl", *written)
    needs = RowRequirements(scores=ScoreRequirement.teacher)
    data, _ = load(path, tmp_path, needs=needs)
    actual = summarise_extra_columns(data.stores[0])
    assert actual.scores == (10, -5.0, 5.0, 0.0)
    assert dict(actual.instructions) == {"do 1": 3, "do 0": 2}
    (query, positive, negative) = shown_texts(
        data.stores[0][0], data.settings[0].text_format, UntruncatedTokenizer(TextTokenizer(small_tokenizer(), 6)), 4
    )
    assert (query.num_tokens, positive.score, negative.score) == (6, 1.0, -1.0)
    assert query.num_untruncated > 6
    static = UntruncatedTokenizer(TextTokenizer(small_tokenizer(), 6, StaticQueryLayout(small_tokenizer())))
    own = shown_texts(data.stores[0][0], data.settings[0].text_format, static, 4)
    assert (own[0].num_untruncated, own[1].num_untruncated) == (query.num_untruncated - 2, 3)
    assert (positive.text, positive.num_tokens, positive.num_untruncated) == ("<s> p </s>", 3, 3)


def test_what_batches_cost_is_what_chunks_cost(tmp_path):
    data, cache = load(write(tmp_path / "rows.jsonl", *rows(40)), tmp_path)
    texts = TextTokenizer(small_tokenizer(), 40)
    data.prepare(texts, cache)
    lengths = data.batch(0).tokens.lengths
    alone = batch_cost(data, [0], 1, 10**6, 10**6, inputs=texts.inputs)  # passes cost so much that there is one
    assert (alone.tokens, alone.chunks, alone.imbalance) == (lengths.sum(), 1, 1)
    assert alone.padding == pytest.approx(1 - lengths.mean() / lengths.max())
    several = batch_cost(data, range(4), 2, 64, 0, inputs=texts.inputs)
    assert several.padding < 0.2
    assert 1 <= several.imbalance < 1.2
    # A cross-encoder reads each document with its query.
    own = small_tokenizer()
    pairs = TextTokenizer(own, 999, PairLayout(own, PairFormat.of(own)))
    whole = batch_cost(data, [0], 1, 10**6, 10**6, inputs=pairs.inputs)
    counts = data.batch(0).tokens.num_documents
    queries, documents = np.split(lengths, [len(counts)])
    assert whole.tokens == (queries * counts).sum() + documents.sum() + counts.sum() * pairs.layout.num_pair_tokens
    assert several.tokens == statistics.fmean(int(data.batch(k).tokens.lengths.sum()) for k in range(4))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_bad_rows_are_all_named_in_order(tmp_path, name):
    good = b'{"query": "a", "pos": ["b"]}\n'
    path = write(tmp_path / name, good, *BAD[:2], b"\n", good, BAD[3], good, BAD[2])
    empty = write(tmp_path / name.replace("rows", "empty"))
    source, cache = TrainSource(path=str(path)), Cache(directory=tmp_path / "cache")
    actual = first_bad_rows(source, "rows", RowRequirements(), 10, cache)
    assert [re.match(rf"{re.escape(str(path))}:(\d+): ", one)[1] for one in actual] == ["2", "3", "6", "8"]
    assert first_bad_rows(source, "rows", RowRequirements(), 2, cache) == actual[:2]
    both = first_bad_rows(
        TrainSource(path=str(tmp_path / name.replace("rows", "*"))), "rows", RowRequirements(), 10, cache
    )
    assert both == [f"{empty}: holds no rows", *actual]
    data = load_train_data([source], on_error=OnError.skip, seed=0, global_batch_size=2, cache=cache)
    assert data.stores[0].report.problems == actual[:3]


def test_texts_are_shortened_in_their_middle_and_hold_no_codes():
    assert shorten_middle("short", 5) == "short"
    for long in ("abcdefghij" * 20, "如何安装软件包" * 20, "a如" * 99):
        for width in (8, 17, 40):
            shown = shorten_middle(long, width)
            assert width - 2 <= cell_len(shown) <= width
            begin, end = shown.split(" … ")
            assert long.startswith(begin)
            assert long.endswith(end)
    assert escape_control("a\nb\tc\x1b[31m\u202e\r\u3000") == "a↵b⇥c\\x1b[31m\\u202e\u3000"


def test_inspect_of_a_file(tmp_path):
    good = [{"query": "如何安装？", "pos": ["用 apt。" * 500], "neg": ["别的\n东西"]}] * 2
    path = write(tmp_path / "rows.jsonl.gz", *good[:1], *BAD[:2], *good[1:], BAD[3])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + BAD[2]))
    output = call("inspect", f"data={path}", "cache_dir=cache", "problems=4", cwd=tmp_path, code=1)
    assert "4 rows that cannot be used" in output
    assert [f"{path}:{line}: " in output for line in (2, 3, 5, 6)] == [True] * 4
    assert re.search(r"^  rows +2$", output, re.M)
    assert re.search(r"^  queries +2 +5 +5 +5\.0 +5 +5 +5$", output, re.M)
    assert re.search(r"^  rows with all texts equal +1 +2$", output, re.M)
    assert re.search(r"^  negative 1 +5  别的↵东西$", output, re.M)
    assert re.search(
        rf"^  positive 1 +3,000  {'用 apt。' * 500}$", output, re.M
    )  # whole, since nobody sees it on a terminal
    assert "lengths are in characters" in output
    assert "\x1b" not in output
    assert not any(line.endswith(" ") for line in output.splitlines())


def test_inspect_of_a_recipe(tmp_path):
    write(tmp_path / "one.jsonl", *rows(60))
    write(tmp_path / "two.jsonl", *rows(20))
    save_small(small_model("xlm-roberta"), tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    queries = {"1": rows(1)[0]["query"].upper(), "2": "new"}
    documents = {"a": rows(2)[1]["pos"][0], "b": "other"}
    beir(tmp_path / "dev", documents, queries, "query-id\tcorpus-id\tscore\n1\ta\t1\n2\tb\t1\n")
    arguments = [
        "recipe=bce_xlmr", "model.path=model", "model.pooling=mean", "model.max_length=24",
        "data.train=[{path: one.jsonl, query_prompt: 'alpha '}, {path: two.jsonl, weight: 2}]", "data.cache_dir=cache",
        "train.epochs=3", "train.global_batch_size=16", "evaluation.sets=[dev]",
    ]  # fmt: skip
    output = call("inspect", *arguments, cwd=tmp_path)
    assert re.search(r"^  dev +2 +1 +2 +1$", output, re.M)
    assert re.search(r"^  query +\d+  <s> alpha .* </s>$", output, re.M)
    assert re.search(r"^  two +20 +0 +40 +2\.00 +40\.0%$", output, re.M)
    assert re.search(r"^  total +80 +0 +100 +100\.0%$", output, re.M)
    assert re.search(r"^  an epoch +100 rows, 7 batches$", output, re.M)
    assert re.search(r"^  all of it +21 steps of 1 batch, 3 epochs$", output, re.M)
    assert re.search(r"^  8 GPUs( +[\d,.]+){3} +\d+\.\d% +1\.\d{3}$", output, re.M)
    assert "directory  cache" in output
    assert not (tmp_path / "runs").exists()
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert {name.partition("-")[0] for name in kept} >= {"rows", "tokens"}


@pytest.mark.slow
def test_a_cross_encoder_shows_pairs(tmp_path):
    write(tmp_path / "one.jsonl", *(row for row in rows(20) if row.get("neg")))
    for architecture in ("xlm-roberta", "qwen3"):
        save_small(small_model(architecture), tmp_path / architecture)
    arguments = ["recipe=bce_reranker", "data.train=[one.jsonl]"]
    arguments += ["data.cache_dir=cache", "evaluation.sets=[]", "train.global_batch_size=8"]
    template = 'model.pair_template={prefix: alpha, query: "beta {query} mu", document: "{document}", suffix: nu}'
    output = call("inspect", *arguments, "model.path=qwen3", "model.max_length=64", template, cwd=tmp_path)
    assert re.search(r"^  positive 1 +\d+ +<s> alpha beta .* mu .* nu </s>$", output, re.M)
    shortest = re.search(r"^  pairs +\d+ +(\d+)", output, re.M)
    shown = re.findall(r"^  (?:positive|negative) 1 +(\d+)", output, re.M)
    assert shortest is not None
    assert int(shortest[1]) <= min(map(int, shown))
    output = call("inspect", *arguments, "model.path=xlm-roberta", "model.max_length=12", cwd=tmp_path)
    assert re.search(r"^  pairs( +[\d.,]+){7} +12 +[1-9]", output, re.M)  # texts, min ... max, limit, cut
    assert re.search(r"^  positive 1 +(\d+|12 of \d+) +<s> .* </s> </s> .* </s>$", output, re.M)


def test_late_interaction_shows_expanded_queries_and_tokens_without_vectors(tmp_path):
    write(tmp_path / "one.jsonl", *rows(20))
    save_small(small_model("xlm-roberta"), tmp_path / "model")
    arguments = ["recipe=colbert_xlmr", "data.train=[one.jsonl]", "model.path=model", "data.cache_dir=cache"]
    options = [
        *("model.query_expansion=min", "model.expansion_length=9", "model.document_length=6"),
        "model.skiplist_words=[alpha, beta, gamma, mu]",
    ]
    printed = call(
        "inspect",
        *arguments,
        "train.global_batch_size=8",
        *options,
        cwd=tmp_path,
    )
    query = re.search(r"^  query +(\d+) +(.*)$", printed, re.M)
    assert query is not None
    assert query[1] == str(len(query[2].split())) == "9"  # the small tokenizer has no mask token
    assert query[2].endswith(" </s> </s> </s>")
    assert re.search(r"^  queries( +[\d.,]+){7} +48 +0", printed, re.M)
    assert re.search(r"^  positives( +[\d.,]+){7} +6 +[1-9]", printed, re.M)
    vectors = re.findall(
        r"^  (?:positive|negative) \d +(\d+)(?: of \d+)?(?:, (\d) vectors)? +<s> (.*) </s>$", printed, re.M
    )
    assert vectors
    for tokens, number, document in vectors:
        skipped = sum(word in ("alpha", "beta", "gamma", "mu") for word in document.split())
        assert int(number or tokens) == int(tokens) - skipped


@pytest.mark.slow
def test_a_source_that_cannot_be_used_hides_no_other(tmp_path):
    write(tmp_path / "one" / "rows.jsonl", *rows(6), *BAD[:1])
    (tmp_path / "sts.csv").write_text("a,b,score\nx,y,4.5\nu,v,1\n")
    (tmp_path / "list.json").write_text(json.dumps(rows(3)))
    arguments = ["data=[one,sts.csv,missing.jsonl,list.json,one/rows.jsonl]", "cache_dir=cache", "examples=1"]
    output = call("inspect", *arguments, cwd=tmp_path, code=1)
    assert re.findall(r"^== (.*) ==$", output, re.M) == ["one", "sts", "missing", "list", "rows", "all of it"]
    one, sts, missing, listed, _, whole = re.split(r"^== .* ==$", output, flags=re.M)[1:]
    assert "1 row that cannot be used\n" in one
    assert re.search(r"✗  sts.csv: column 'score'.*loss=infonce", sts)
    assert "for_loss=cosent" in sts
    assert re.search(r"^  recognised as +columns a = query, b = positive, score = score \(by order; ", sts, re.M)
    assert re.search(r"^  queries +2 +1 ", sts, re.M)
    assert re.search(r"^  positive 1 \(4\.5\) +1  y$", sts, re.M)
    assert missing.strip().endswith("✗  missing.jsonl: no such file or folder")
    assert "as the model sees it: list.json: element 1\n" in listed
    assert "✗  sts, missing cannot be trained on" in whole
    alone = call("inspect", "data.train=[sts.csv]", "data.cache_dir=cache", cwd=tmp_path, code=1)
    assert "loss=cosent" in alone
    assert "recognised as" in call("inspect", "data=sts.csv", "for_loss=cosent", "cache_dir=c", cwd=tmp_path)


def test_sources_that_do_not_fit_together_are_shown_and_reported(tmp_path):
    for name, count in (("one", 1), ("two", 2)):
        write(tmp_path / f"{name}.jsonl", *[{"query": "q", "pos": ["p"], "neg": ["n", "m"][:count]}] * 3)
    arguments = ["data.train=[one.jsonl,two.jsonl]", "data.cache_dir=cache", "loss=sentence_transformers"]
    output = call("inspect", *arguments, "loss.class_name=TripletLoss", cwd=tmp_path, code=1)
    assert re.findall(r"^  rows +(\d)$", output, re.M) == ["3", "3"]
    assert "✗  data.train: one has rows with 1 negatives and two with 2, " in output


@pytest.mark.slow
def test_empty_files_and_equal_names(tmp_path):
    for folder in ("a", "b"):
        write(tmp_path / folder / "rows.jsonl", *rows(2))
    write(tmp_path / "b" / "empty.jsonl")
    write(tmp_path / "b" / "bad.jsonl", *BAD[:2])
    output = call("inspect", "data=[a/rows.jsonl,b/*]", "cache_dir=cache", cwd=tmp_path, code=1)
    assert "\n2 rows that cannot be used and 1 empty file\n" in output
    assert re.search(r"^  b +2 +2$", output, re.M)
    output = call("inspect", "data=[a/rows.jsonl,b/rows.jsonl]", "cache_dir=cache", cwd=tmp_path)
    assert re.findall(r"^== (.*) ==$", output, re.M) == ["a/rows", "b/rows", "all of it"]


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["data=rows.jsonl"], {"WORLD_SIZE": "2"}, "single process"),
        (
            ["data=rows.jsonl", "for_loss=triplet"],
            {},
            "no row that can be trained on (1 skipped, the first: rows.jsonl:1: ",
        ),
    ],
)
def test_errors_are_one_sentence(tmp_path, monkeypatch, arguments, environment, sentence):
    write(tmp_path / "rows.jsonl", {"query": "a", "pos": ["b"]})
    for name, value in environment.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    output = call("inspect", *arguments, "cache_dir=cache", cwd=tmp_path, code=1)
    assert re.fullmatch(rf"error: [^\n]*{re.escape(sentence)}[^\n]*\n", output), output
