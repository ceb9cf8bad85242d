"""Checks of drafts are those of the plain definitions: runs of words, pairs of queries, languages, grades."""

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from embedtrain.commands.synthesize.checks import (
    COPIED,
    EMPTY,
    GRADE,
    LANGUAGE,
    NO_GRADE,
    ChecksConfig,
    DraftChecks,
    Duplicate,
    LanguageCheck,
    Refiner,
    Tally,
    check_checks,
    copied_words,
    find_duplicates,
    words_of,
)
from embedtrain.commands.synthesize.prompts import Prompts
from embedtrain.commands.synthesize.types import Answer, Draft, Refusal, RefusalReason, Reply, Request
from embedtrain.config.options import check_values
from embedtrain.config.parsing import merge_options
from embedtrain.errors import ConfigError
from tests.conftest import ROOT

ENGLISH = "A tool that compresses files without loss, and unpacks them again on any machine."
GERMAN = "Ein Werkzeug, das Dateien ohne Verlust packt und auf jedem Rechner wieder entpackt."
CHINESE = "一个无损压缩文件的工具，可以在任何机器上再次解压缩。"


def draft(query: str, document: str = ENGLISH, **fields) -> Draft:
    return Draft(
        query=query, kind="question", sources=(document,), positives=(document,), ids=("d",), prompt="0" * 12, **fields
    )


@pytest.fixture(scope="module")
def language_check() -> LanguageCheck:
    return LanguageCheck()


class ScriptedAsker:
    """Answers as told; keeps what it was asked."""

    name = "scripted"

    def __init__(self, replies: Sequence[Reply | str]) -> None:
        self.replies, self.requests = list(replies), list[Request]()

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        self.requests += requests
        replies = [self.replies.pop(0) for _ in requests]
        return [Answer(reply, 1, 1) if isinstance(reply, str) else reply for reply in replies]


def refiner(*replies: Reply | str, seed: int = 0) -> Refiner:
    return Refiner(
        asker=ScriptedAsker(replies),
        prompts=Prompts(None),
        temperature=0.7,
        max_new_tokens=64,
        seed=seed,
        tally=Tally(),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't PANIC, it's C++!", ["don", "t", "panic", "it", "s", "c"]),
        ("ﬁle №1", ["file", "no1"]),
        ("用gzip压缩", ["用", "gzip", "压", "缩"]),
        ("snake_case", ["snake", "case"]),
        ("...", []),
    ],
)
def test_words_are_runs_of_letters_and_single_characters_of_scripts_without_spaces(text, words):
    assert words_of(text) == words


def longest_common_run(first: Sequence[str], second: Sequence[str]) -> int:
    return max(
        (
            length
            for start in range(len(first))
            for length in range(1, len(first) - start + 1)
            for other in range(len(second))
            if first[start : start + length] == second[other : other + length]
        ),
        default=0,
    )


def test_copied_words_are_found_if_the_longest_common_run_is_longer_than_the_limit():
    draw, found = random.Random(1), 0
    for _ in range(300):
        query, document = (" ".join(draw.choices("abc", k=draw.randint(0, 12))) for _ in range(2))
        for limit in (1, 2, 4):
            run = copied_words(query, document, limit)
            assert bool(run) == (longest_common_run(query.split(), document.split()) > limit), (query, document, limit)
            assert run in document
            found += bool(run)
    assert found > 50


def test_two_characters_of_chinese_count_as_a_word_that_is_copied():
    assert copied_words("怎样无损压缩文件", CHINESE, 2) == "无 损 压 缩 文"
    assert copied_words("怎样无损压缩文件", CHINESE, 3) == ""


def similarity(first: str, second: str) -> float:
    sets = []
    for text in (first, second):
        words = words_of(text)
        sets.append({*words} | set(pairwise(words)))
    return len(sets[0] & sets[1]) / max(1, len(sets[0] | sets[1]))


@pytest.mark.parametrize("near", [3 / 7, 0.5, 0.8, 1.0])
def test_near_duplicates_are_those_of_comparing_all_pairs(near):
    draw = random.Random(2)
    texts = []
    for _ in range(150):
        words = draw.choices([f"w{number}" for number in range(12)], k=draw.randint(1, 16))
        texts.append(" ".join(words))
        if draw.random() < 0.5:  # a text with one other word, whose features are the rarest
            words[draw.randrange(len(words))] = f"other{len(texts)}"
            texts.append(" ".join(words).upper())
        texts += draw.choices(texts, k=draw.random() < 0.2)
    existing, texts = texts[:30], texts[30:]

    kept, expected = list(existing), []
    for text in texts:
        is_new = all(similarity(text, other) < near for other in kept)
        expected.append(is_new)
        if is_new:
            kept.append(text)
    found = find_duplicates(texts, near, existing)
    assert [duplicate is None for duplicate in found] == expected
    assert 10 < sum(expected) < len(texts) - 10
    for text, duplicate in zip(texts, found, strict=True):
        if duplicate is not None:
            other = texts[duplicate.of] if duplicate.of >= 0 else existing[-1 - duplicate.of]
            assert similarity(text, other) == pytest.approx(duplicate.similarity)


def test_a_feature_of_many_texts_does_not_make_them_compared():
    # With all pairs compared, this test takes minutes.
    texts = [f"what is the purpose of package number {number}x{number}" for number in range(20_000)]
    assert find_duplicates(texts, 0.9) == [None] * len(texts)


def test_texts_that_repeat_an_earlier_one_or_an_example_are_duplicates():
    texts = ["how to compress files", "How to compress files?", "what users ask", "new"]
    found = find_duplicates(texts, None, ["another", "What users ask."])
    assert found == [None, Duplicate(0, 1.0), Duplicate(-2, 1.0), None]
    long = "how do I compress a lot of very large files without loss of any data on a slow machine"
    similar = [long, long.replace("slow", "small")]
    assert find_duplicates(similar, 0.8) == [None, Duplicate(0, 32 / 38)]
    assert find_duplicates(similar, None) == [None, None]


@pytest.mark.parametrize(
    ("query", "document", "asked", "why"),
    [
        ("how do I compress files", ENGLISH, None, ""),
        ("wie packe ich große Dateien?", ENGLISH, None, "German instead of English"),
        ("how do I compress files", GERMAN, None, "English instead of German"),
        ("wie packe ich große Dateien?", ENGLISH, "de", ""),
        ("wie packe ich große Dateien?", ENGLISH, "de-AT", ""),
        ("how do I compress files", ENGLISH, "de", "English instead of German"),
        ("怎样压缩文件", ENGLISH, "zh", ""),
        ("怎样压缩文件", CHINESE, None, ""),
        ("ファイルを圧縮する方法", CHINESE, None, "Japanese instead of Chinese"),
        ("сжать", ENGLISH, None, "Russian instead of English"),
        ("gzip", CHINESE, None, ""),  # a name
        ("PostgreSQL 15", GERMAN, None, ""),
        ("wie packe ich große Dateien?", ENGLISH, "tlh", ""),  # a language that cannot be recognised
    ],
)
def test_queries_in_another_language_fail(language_check, query, document, asked, why):
    assert language_check.why(draft(query, document, language=asked)) == why


def test_either_language_of_two_documents_is_right(language_check):
    both = replace(draft("wie packe ich große Dateien?"), sources=(ENGLISH, GERMAN))
    assert language_check.why(both) == ""
    assert language_check.why(replace(both, query="怎样压缩文件的工具")).endswith("instead of German or English")


@pytest.mark.parametrize(("file", "right", "wrong"), [("train-en", "en", "zh"), ("train-zh2zh", "zh", "en")])
def test_short_lines_full_of_names_have_the_right_language(language_check, file, right, wrong):
    with gzip.open(ROOT / "recipes" / "quickstart" / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, 700)][::7]
    for language, fails in ((None, 0), (right, 0), (wrong, 0.95)):
        drafts = [draft(row["query"], row["pos"][0], language=language) for row in rows]
        share = sum(bool(language_check.why(each)) for each in drafts) / len(drafts)
        assert share == 0 if fails == 0 else share >= fails, (file, language, share)


def test_a_draft_fails_at_its_first_check_and_is_counted_once():
    tally, checks = Tally(), ChecksConfig(max_copied_words=3)
    drafts = [
        draft("tool for packing data"),
        draft("?!"),
        draft("what compresses files without loss"),
        draft("wie packe ich große Dateien?"),
    ]
    tally.count(drafts)
    assert DraftChecks(checks, tally).passed(drafts) == drafts[:1]
    assert {check: tally.num_rejected(check) for check in tally.rejected} == {EMPTY: 1, COPIED: 1, LANGUAGE: 1}
    assert tally.samples[COPIED][0].why == "copies 'compresses files without loss'"
    assert tally.to_json() == {
        "written": 4,
        "kept": 1,
        "rejected": {"empty": 1, "copied": 1, "language": 1},
        "by_kind": {"question": {"written": 4, "rejected": {"empty": 1, "copied": 1, "language": 1}}},
    }
    every = ChecksConfig(max_copied_words=None, languages=False)
    assert DraftChecks(every, Tally()).passed(drafts) == [drafts[0], *drafts[2:]]


def test_the_judge_grades_each_draft():
    replies = [
        '{"reason": "It answers.", "grade": 5}',
        'Sure! ```json\n{"reason": "Off topic", "grade": "2/5"}```',
        '{"grade": 4.0}',
        '{"grade": 7}',
        "I do not know",
        Refusal(RefusalReason.budget),
        '{"grade": true}',
    ]
    judge = refiner(*replies)
    drafts = [draft(f"query {number}", language=None) for number in range(len(replies))]
    graded = judge.judge(drafts, 4)
    assert [(each.query, each.grade) for each in graded] == [("query 0", 5), ("query 2", 4)]
    assert {check: judge.tally.num_rejected(check) for check in (GRADE, NO_GRADE)} == {GRADE: 1, NO_GRADE: 4}
    assert judge.tally.samples[GRADE][0].why == "grade 2: Off topic"
    assert "the budget is spent" in [sample.why for sample in judge.tally.samples[NO_GRADE]]
    request = judge.asker.requests[0]
    assert request.temperature == 0 and request.purpose == "judge"
    assert "query 0" in request.messages[-1].content and ENGLISH in request.messages[-1].content


def test_a_paraphrase_replaces_the_query_if_there_is_one():
    drafts = [draft("compress files"), draft("unpack files"), draft("list files")]
    changed = refiner('{"queries": ["pack data"]}', Refusal(RefusalReason.failed), "[]").paraphrase(drafts)
    assert [each.query for each in changed] == ["pack data", "unpack files", "list files"]
    assert changed[0] == replace(drafts[0], query="pack data")


def test_a_share_of_drafts_is_paraphrased_whatever_the_others_are():
    drafts = [draft(f"query {number}") for number in range(200)]
    asked = refiner(*['{"queries": ["x"]}'] * 200)
    changed = [each.query == "x" for each in asked.paraphrase(drafts, 0.3)]
    assert 40 < sum(changed) < 80
    part = refiner(*['{"queries": ["x"]}'] * 200).paraphrase(drafts[50:90], 0.3)
    assert [each.query == "x" for each in part] == changed[50:90]
    other = refiner(*['{"queries": ["x"]}'] * 200, seed=1).paraphrase(drafts, 0.3)
    assert [each.query == "x" for each in other] != changed
    assert len({request.seed for request in asked.asker.requests}) == len(asked.asker.requests)


def test_generated_negatives_are_other_texts_than_the_document():
    answer = json.dumps({"documents": ["Another tool.", ENGLISH.upper(), "another TOOL", "", "A third.", "A fourth."]})
    (with_two,) = refiner(answer).add_negatives([draft("compress files")], 2)
    assert with_two.negatives == ("Another tool.", "A third.")
    (without,) = refiner("nothing").add_negatives([draft("compress files")], 2)
    assert without.negatives == ()


def test_limits_of_checks_are_named():
    check_values(ChecksConfig(), "checks.")
    config = ChecksConfig(near_duplicate=1.5)
    with pytest.raises(ConfigError, match=r"checks\.near_duplicate=1\.5"):
        check_values(config, "checks.")
    config = ChecksConfig()
    config.judge.min_grade = 6
    with pytest.raises(ConfigError, match=r"checks\.judge\.min_grade=6"):
        check_values(config, "checks.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge": {"writer": {"model": "DIR"}}}, r"checks\.judge\.min_grade=null: is missing"),
        ({"judge": {"min_grade": 4, "writer": {"url": "http://localhost"}}}, r"checks\.judge\.writer\.model"),
        ({"round_trip": {"keep_rank": 5}}, r"checks\.round_trip\.model='': is missing"),
    ],
)
def test_checks_without_what_they_need_are_refused(changes, message):
    check_checks(merge_options(ChecksConfig, {"judge": {"min_grade": 4}, "round_trip": {"model": "DIR"}}, "checks"), "")
    with pytest.raises(ConfigError, match=message):
        check_checks(merge_options(ChecksConfig, changes, "checks"), "checks.")
