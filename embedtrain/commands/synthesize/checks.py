"""Which drafts become rows: checks of one draft, of all drafts together, and what further requests change in them.

A word is a run of letters and digits, without case; in scripts that are written without spaces it is one character.

Shapes: N drafts.
"""

import collections
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from embedtrain.commands.synthesize.prompts import (
    JUDGE_SCHEMA,
    Prompts,
    documents_schema,
    language_name,
    parse_answer,
    queries_schema,
    texts_in,
)
from embedtrain.commands.synthesize.types import (
    Answer,
    Asker,
    Draft,
    Purpose,
    Refusal,
    Reply,
    Request,
    WriterConfig,
    check_writer,
)
from embedtrain.config.options import option
from embedtrain.config.validation import OptionChecks
from embedtrain.data.rows import text_key
from embedtrain.errors import ConfigError
from embedtrain.mining.options import FilterOptions
from embedtrain.utils.formatting import install_command

# Chinese, Japanese, Thai, Lao, Burmese and Khmer, whose words are not separated.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}\U00020000-\U0003ffff]|[^\W_{_UNSPACED}\U00020000-\U0003ffff]+")
_CHARACTERS_PER_WORD = 2  # of those scripts, for limits in words


@dataclass(kw_only=True)
class JudgeConfig:
    """A language model that grades each query with its document, from 1 to 5."""

    # Queries with a lower grade are thrown away: 4 asks for documents that answer the query. Null: no judge.
    min_grade: int | None = option(None, within=(1, 5), hint="null for no judge")
    writer: WriterConfig = field(default_factory=WriterConfig)  # the judge; without a model, the writer of the queries


@dataclass(kw_only=True)
class RoundTripConfig:
    """An embedding model that has to find the document of each query."""

    model: str = option("", is_input=True)  # model directory or Hub id; without one, queries are not searched for
    revision: str | None = option(None, is_revision=True)  # a commit, tag or branch of its Hub repository
    # A document is found if at most keep_rank - 1 other documents of `corpus` score higher.
    keep_rank: int = option(10, at_least=1)


@dataclass(kw_only=True)
class ChecksConfig:
    """Which queries are thrown away."""

    # Most words in a row that a query has in common with its document; two characters of Chinese or Japanese are a word
    max_copied_words: int | None = option(8, at_least=1, hint="null for no limit")
    # Smallest Jaccard similarity of the words and pairs of words of two queries, of which the later one is thrown away.
    # Null: only queries that are equal but for case and punctuation.
    near_duplicate: float | None = option(0.8, above=0, at_most=1, hint="null keeps near-duplicates")
    languages: bool = True  # whether queries have to be in the language asked for, else in that of their document
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    round_trip: RoundTripConfig = field(default_factory=RoundTripConfig)


def check_checks(checks: ChecksConfig, prefix: str) -> None:
    """Raise a ConfigError for options that cannot work; `prefix`, such as `checks.`, precedes their names."""
    judge = checks.judge
    OptionChecks(judge, f"{prefix}judge.").require(
        judge.min_grade is not None or judge.writer == WriterConfig(),
        "min_grade",
        "is missing, and judge.writer has no effect without it; write a grade such as 4",
    )
    if judge.writer != WriterConfig():
        check_writer(judge.writer, f"{prefix}judge.writer.")
    OptionChecks(checks.round_trip, f"{prefix}round_trip.").require(
        bool(checks.round_trip.model) or checks.round_trip == RoundTripConfig(),
        "model",
        "is missing, and the other options of round_trip have no effect without it; write a model or Hub id",
    )


# The checks by which queries are thrown away, in their order, and what the report calls them.
EMPTY, COPIED, LANGUAGE, NO_GRADE, GRADE = "empty", "copied", "language", "no_grade", "grade"
DUPLICATE, NEAR_DUPLICATE, ROUND_TRIP = "duplicate", "near_duplicate", "round_trip"
TITLES = {
    EMPTY: "without words",
    COPIED: "copied from the document",
    LANGUAGE: "in another language",
    NO_GRADE: "not graded",
    GRADE: "graded too low",
    DUPLICATE: "duplicates",
    NEAR_DUPLICATE: "near-duplicates",
    ROUND_TRIP: "document not found by the query",
}


@dataclass(frozen=True, slots=True)
class Rejected:
    """A query that was thrown away, and why."""

    query: str
    kind: str
    document: str  # that it was written for
    why: str


@dataclass(kw_only=True)
class Tally:
    """Counts and samples of what was written and thrown away; equal on all ranks, which see the same drafts."""

    SAMPLES = 5

    written: collections.Counter[str] = field(default_factory=collections.Counter)  # drafts by kind
    rejected: dict[str, collections.Counter[str]] = field(default_factory=dict)  # by check and kind
    samples: dict[str, list[Rejected]] = field(default_factory=dict)  # by check, the first ones
    unanswered: int = 0  # requests about drafts that have no answer

    def count(self, drafts: Iterable[Draft]) -> None:
        """Count drafts before any check."""
        self.written.update(draft.kind for draft in drafts)

    def reject(self, check: str, draft: Draft, why: str = "") -> None:
        """Count a draft that is thrown away."""
        self.rejected.setdefault(check, collections.Counter())[draft.kind] += 1
        samples = self.samples.setdefault(check, [])
        if len(samples) < self.SAMPLES:
            samples.append(Rejected(draft.query, draft.kind, draft.sources[0] if draft.sources else "", why))

    @property
    def num_written(self) -> int:
        """Drafts of all kinds."""
        return self.written.total()

    def num_rejected(self, check: str | None = None) -> int:
        """Drafts that a check, or all checks, threw away."""
        checks = list(self.rejected) if check is None else [check]
        return sum(self.rejected.get(name, collections.Counter[str]()).total() for name in checks)

    def to_json(self) -> dict[str, Any]:
        """For synthesis.json."""
        return {
            "written": self.num_written,
            "kept": self.num_written - self.num_rejected(),
            "rejected": {check: self.num_rejected(check) for check in self._checks()},
            "by_kind": {
                kind: {
                    "written": count,
                    "rejected": {check: n for check in self._checks() if (n := self.rejected[check][kind])},
                }
                for kind, count in sorted(self.written.items())
            },
        }

    def _checks(self) -> list[str]:
        """Those that threw something away, in the order of TITLES."""
        return sorted(self.rejected, key=lambda check: (list(TITLES).index(check) if check in TITLES else -1, check))


def words_of(text: str) -> list[str]:
    """The words of a text."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def copied_words(query: str, document: str, limit: int) -> str:
    """The first run of more than `limit` words that a query has in common with a document; "" without one."""
    words, text = words_of(query), f" {' '.join(words_of(document))} "
    lengths = [1 / _CHARACTERS_PER_WORD if _is_unspaced(word) else 1.0 for word in words]
    for start in range(len(words)):
        total = 0.0
        for end in range(start, len(words)):
            total += lengths[end]
            if total > limit:
                run = " ".join(words[start : end + 1])
                if f" {run} " in text:
                    return run
                break
    return ""


def _is_unspaced(word: str) -> bool:
    return len(word) == 1 and re.match(rf"[{_UNSPACED}\U00020000-\U0003ffff]", word) is not None


class LanguageCheck:
    """Recognises queries in another language than the one that was asked for, else that of their document.

    Texts of few words are in several languages at once, and names in all: a query fails only if another language is far
    more probable than the right one, and a query of a few Latin letters never does.
    """

    # Of 2,238 English and Chinese synopses of Debian packages none fails; 99 % do if the other language is asked for.
    TIMES_AS_PROBABLE = 100
    MIN_LATIN_LETTERS = 15
    _MAX_CHARACTERS = 2000  # of a document

    def __init__(self) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ModuleNotFoundError:
            raise ConfigError(
                "checks.languages=true needs the package py3langid, which is not installed: "
                f"{install_command('synthesize')}, or write checks.languages=false"
            ) from None
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        # Those that have no code of two letters are rare, and texts of names and numbers are often taken for one.
        self._identifier.set_languages([code for code in self._identifier.labels if len(code) == 2])
        self._language_of = lru_cache(maxsize=1 << 14)(self._probable_language)

    def why(self, draft: Draft) -> str:
        """In which language the query is, and in which it should be; "" if nothing speaks against it."""
        letters = [letter for letter in draft.query if letter.isalpha()]
        if len(letters) < self.MIN_LATIN_LETTERS and all("LATIN" in unicodedata.name(each, "") for each in letters):
            return ""
        asked = draft.language and re.split("[-_]", draft.language)[0].casefold()
        expected = {asked} if asked else {self._language_of(source[: self._MAX_CHARACTERS]) for source in draft.sources}
        probabilities: dict[str, float] = dict(self._identifier.rank(draft.query))
        limit = max(probabilities.values()) / self.TIMES_AS_PROBABLE
        if any(probabilities.get(language, 1.0) >= limit for language in expected):
            return ""
        language = max(probabilities, key=probabilities.__getitem__)
        wanted = " or ".join(language_name(each) for each in sorted(expected))
        return f"{language_name(language)} instead of {wanted}"

    def _probable_language(self, text: str) -> str:
        language: str = self._identifier.classify(text)[0]
        return language


class DraftChecks:
    """The checks of one draft at a time."""

    def __init__(self, config: ChecksConfig, tally: Tally) -> None:
        self._config, self._tally = config, tally
        self._languages = LanguageCheck() if config.languages else None

    def passed(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts that pass; the others are counted."""
        return [draft for draft in drafts if self._passes(draft)]

    def _passes(self, draft: Draft) -> bool:
        if not words_of(draft.query):
            self._tally.reject(EMPTY, draft)
            return False
        limit = self._config.max_copied_words
        for source in draft.sources if limit is not None else ():
            if copied := copied_words(draft.query, source, limit or 0):
                self._tally.reject(COPIED, draft, f"copies '{copied}'")
                return False
        if self._languages is not None and (why := self._languages.why(draft)):
            self._tally.reject(LANGUAGE, draft, why)
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Refiner:
    """Asks a language model about drafts: for other words, for a grade, for documents that do not answer.

    All methods are collectives, as `Asker.ask` is. A draft without an answer stays as it is, except without a grade.

    Attributes:
        asker: the language model.
        prompts: the templates `paraphrase`, `judge` and `negatives`.
        temperature, max_new_tokens: of sampling; the judge has temperature 0.
        seed: of the command. What is drawn for a draft depends on it and on the draft alone.
    """

    asker: Asker
    prompts: Prompts
    temperature: float
    max_new_tokens: int
    seed: int
    tally: Tally

    def paraphrase(self, drafts: Sequence[Draft], share: float = 1.0) -> list[Draft]:
        """The drafts, of which this share have other words."""
        chosen = [index for index, draft in enumerate(drafts) if self._drawn("paraphrase", draft) < share]
        replies = self._ask("paraphrase", [drafts[index] for index in chosen], queries_schema(1), count=1)
        results = list(drafts)
        for index, reply in zip(chosen, replies, strict=True):
            texts = _texts(reply, "queries", "query")
            if texts:
                results[index] = replace(drafts[index], query=texts[0])
        return results

    def judge(self, drafts: Sequence[Draft], min_grade: int) -> list[Draft]:
        """The drafts with a grade of at least `min_grade`; those with a lower one or none are counted."""
        results = []
        for draft, reply in zip(drafts, self._ask("judge", drafts, JUDGE_SCHEMA, temperature=0.0), strict=True):
            grade, reason = _grade(reply)
            if grade is None:
                self.tally.reject(NO_GRADE, draft, reason)
            elif grade < min_grade:
                self.tally.reject(GRADE, draft, f"grade {grade}: {reason}" if reason else f"grade {grade}")
            else:
                results.append(replace(draft, grade=grade))
        return results

    def add_negatives(self, drafts: Sequence[Draft], count: int) -> list[Draft]:
        """The drafts with up to `count` generated negatives each, none of them equal to a document or another one."""
        replies = self._ask("negatives", drafts, documents_schema(count), count=count)
        results = []
        for draft, reply in zip(drafts, replies, strict=True):
            seen = {tuple(words_of(text)) for text in (*draft.sources, *draft.positives, draft.query)} | {()}
            negatives = list(draft.negatives)
            for text in _texts(reply, "documents", "negatives", "passages"):
                words = tuple(words_of(text))
                if words not in seen and len(negatives) < len(draft.negatives) + count:
                    seen.add(words)
                    negatives.append(text)
            results.append(replace(draft, negatives=tuple(negatives)))
        return results

    def _ask(
        self,
        purpose: Purpose,
        drafts: Sequence[Draft],
        schema: dict[str, Any],
        temperature: float | None = None,
        **values: Any,
    ) -> list[Reply]:
        requests = [
            Request(
                messages=self.prompts.render(
                    purpose, query=draft.query, documents=draft.sources, instruction=draft.instruction, **values
                ),
                purpose=purpose,
                schema=schema,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature if temperature is None else temperature,
                seed=self._key(purpose, draft) % (1 << 31),
            )
            for draft in drafts
        ]
        replies = self.asker.ask(requests)
        self.tally.unanswered += sum(isinstance(reply, Refusal) for reply in replies)
        return replies

    def _drawn(self, purpose: str, draft: Draft) -> float:
        """A number from 0 to 1, uniformly distributed over drafts."""
        return self._key(f"drawn for {purpose}", draft) / (1 << 63)

    def _key(self, purpose: str, draft: Draft) -> int:
        return text_key("\0".join([str(self.seed), purpose, draft.query, *draft.sources]))


def _texts(reply: Reply, *names: str) -> list[str]:
    """The texts of an answer; none without one."""
    parsed = parse_answer(reply.text) if isinstance(reply, Answer) else None
    if parsed is None:
        return []
    return [text.strip() for text in texts_in(parsed.value, *names) if isinstance(text, str) and text.strip()]


def _grade(reply: Reply) -> tuple[int | None, str]:
    """The grade from 1 to 5 and the reason for it, or no grade and why there is none."""
    if not isinstance(reply, Answer):
        return None, str(reply)
    parsed = parse_answer(reply.text)
    value = parsed.value if parsed is not None else None
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    if not isinstance(value, dict):
        return None, "the answer is no JSON object"
    reason, grade = value.get("reason"), value.get("grade")
    match = re.match(r"\s*([1-5])(?:\.0+)?\s*(?:/\s*5)?\s*$", str(grade))
    if match is None or isinstance(grade, bool):
        return None, f"the grade is {grade!r:.40}"
    return int(match[1]), reason.strip() if isinstance(reason, str) else ""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A text that nearly equals an earlier one."""

    of: int  # the earlier one; below 0, of `existing`, the first of which is -1
    similarity: float  # Jaccard similarity of words and pairs of words


def find_duplicates(texts: Sequence[str], near: float | None, existing: Sequence[str] = ()) -> list[Duplicate | None]:
    """For each of N texts, an earlier text that it duplicates; None for those to keep.

    Two texts are duplicates if they have the same words in the same order, and near-duplicates if the Jaccard
    similarity of their words and pairs of neighbouring words is at least `near`; None finds duplicates only. A text is
    near to `existing`, or to an earlier text that is kept.

    The result is that of comparing all pairs, but only pairs that share one of their rarest features are compared: if
    the similarity of two sets is at least t, each has one of the common elements among its n - ceil(t * n) + 1 rarest
    ones, where n is its own size (Chaudhuri, Ganti and Kaushik, "A Primitive Operator for Similarity Joins in Data
    Cleaning", ICDE 2006).
    """
    words = [words_of(text) for text in (*existing, *texts)]
    duplicates: list[Duplicate | None] = [None] * len(words)
    first: dict[int, int] = {}  # by the key of all words, the first text with them
    for number, of_text in enumerate(words):
        earlier = first.setdefault(text_key(" ".join(of_text)), number)
        if earlier != number:
            duplicates[number] = Duplicate(earlier, 1.0)
    if near is not None:
        distinct = sorted(first.values())
        features = _rare_first([_features(words[number]) for number in distinct])
        num_existing = sum(number < len(existing) for number in distinct)
        for number, found in zip(distinct, _near_duplicates(features, near, num_existing), strict=True):
            if found is not None:
                duplicates[number] = replace(found, of=distinct[found.of])
    num = len(existing)
    return [
        found if found is None else replace(found, of=found.of - num if found.of >= num else -1 - found.of)
        for found in duplicates[num:]
    ]


def _features(words: Sequence[str]) -> set[str]:
    return {*words, *(f"{first} {second}" for first, second in pairwise(words))}


def _rare_first(sets: Sequence[set[str]]) -> list[list[int]]:
    """The elements of each set as numbers that ascend with their frequency."""
    counts = collections.Counter(feature for each in sets for feature in each)
    # Sorted by the text as well: the order of a set of texts differs between processes.
    number_of = {feature: number for number, feature in enumerate(sorted(counts, key=lambda key: (counts[key], key)))}
    return [sorted(number_of[feature] for feature in each) for each in sets]


def _near_duplicates(sets: Sequence[Sequence[int]], near: float, num_existing: int) -> list[Duplicate | None]:
    """As `find_duplicates`, of different sets, of which the first `num_existing` are kept whatever they equal."""
    results: list[Duplicate | None] = []
    with_element: dict[int, list[int]] = {}  # by element, the kept sets that have it among their rarest ones
    for number, elements in enumerate(sets):
        # Rounding of t * n must not shorten the list.
        rarest = elements[: len(elements) - ceil(near * len(elements) - 1e-9) + 1]
        found = None
        if number >= num_existing:
            of_this = set(elements)
            for other in sorted({kept for element in rarest for kept in with_element.get(element, ())}):
                shared = len(of_this.intersection(sets[other]))
                similarity = shared / (len(of_this) + len(sets[other]) - shared)
                if similarity >= near:
                    found = Duplicate(other, similarity)
                    break
        results.append(found)
        if found is None:
            for element in rarest:
                with_element.setdefault(element, []).append(number)
    return results


def document_ranks(drafts: Iterable[Draft], search: FilterOptions) -> list[int]:
    """For each draft, the rank that its query gives to its document, or to the worst one of several. A collective.

    The rank is 1 plus the number of other documents, of the drafts and of `search.corpus`, that score higher. Only rank
    0 reads the drafts; all return the ranks. Intermediate files are below `search.output_dir`: an interrupted search
    for the same drafts with the same model resumes, and another one begins again.
    """
    from embedtrain.config.losses import InfoNCEConfig
    from embedtrain.config.parsing import parse_sources
    from embedtrain.distributed.world import joined_world
    from embedtrain.mining.consistency import filter_rows
    from embedtrain.utils.files import Checksums, atomic_write, checksum_of, remove_tree, require_no_links

    folder = Path(search.output_dir)
    rows, results, is_empty, ranks = folder / "drafts.jsonl", folder, True, list[int]()
    with joined_world(search.timeout) as world:
        with world.fail_together("writing queries to search for"):
            if world.is_main:
                require_no_links(folder)
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(rows) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as file:
                    file.writelines(f"{json.dumps(_searched_row(draft), ensure_ascii=False)}\n" for draft in drafts)
                is_empty = not rows.stat().st_size
                content = [Checksums.of(rows).files, search.model, search.revision]
                results = folder / f"ranks-{checksum_of(content)[:12]}"
                for other in folder.glob("ranks-*"):
                    if other != results:
                        remove_tree(other)
        is_empty, name = world.broadcast((is_empty, results.name))
        if is_empty:
            return []
        data = parse_sources([str(rows)], "data", InfoNCEConfig())
        annotated = replace(search, data=data, output_dir=str(folder / name), keep_rank=None, annotate=True)
        (written,) = filter_rows(annotated, lambda *_: None)
        with world.fail_together("reading the ranks of documents"):
            if world.is_main:
                with written.open(encoding="utf-8") as file:
                    ranks = [max(json.loads(line)["rank"]) for line in file]
        return world.broadcast(ranks)


def _searched_row(draft: Draft) -> dict[str, Any]:
    row = draft.row("")
    return {name: row[name] for name in ("query", "pos", "pos_id", "prompt") if name in row}
