"""Roles of columns by their names: one table for training rows, corpora and evaluation sets."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from embedtrain.data.sources import values
from embedtrain.data.sources.values import describe_value, list_names

# Names without case, underscores, hyphens and spaces. Names of a later group count only where a row has none of an
# earlier one: in {"query", "title", "text"} the title is no query.
QUERY_NAMES = (
    frozenset(
        (
            *("query", "queries", "question", "questions", "anchor", "q", "qry", "searchquery", "userquery"),
            "userquestion",
        )
    ),
    frozenset(
        (
            *("title", "headline", "heading", "source", "src", "input", "instruction", "prompt", "premise", "claim"),
            *("summary", "keyword", "keywords", "term", "docstring", "utterance", "caption", "captions"),
        )
    ),
)
POSITIVE_NAMES = (
    frozenset(
        (
            *("positive", "positives", "pos", "p", "positivetext", "positivepassage", "positivepassages", "postarget"),
            *("positivedocument", "positivedocuments", "positivedoc", "positivedocs", "posdoc", "posdocs"),
            *("positivectx", "positivectxs", "positivecontext", "positivecontexts", "positiveanswer", "chosen"),
        )
    ),
    frozenset(
        (
            *("answer", "answers", "response", "responses", "reply", "output", "completion", "target", "tgt"),
            *("document", "documents", "doc", "docs", "passage", "passages", "context", "contexts", "text", "texts"),
            *("body", "abstract", "content", "contents", "article", "paragraph", "chunk", "hypothesis", "evidence"),
            "code",
        )
    ),
)
# Two columns of one kind: the first is the query. Those of entailment are pairs of sentences as well.
PAIR_NAMES = tuple(
    (f"{stem}{first}", f"{stem}{second}")
    for stem in ("sentence", "sent", "text", "question", "query", "s", "phrase", "title", "doc", "document", "passage")
    for first, second in (("1", "2"), ("a", "b"), ("0", "1"))
)
# How similar or relevant a text is: a number. A label may also be the name of a class.
_SCORE_NAMES = frozenset(
    (
        *("score", "scores", "similarity", "similarities", "similarityscore", "similarityscores", "simscore", "sim"),
        *("goldscore", "relatedness", "relatednessscore", "relevancescore", "relevancyscore", "cosinesimilarity"),
        *("stsscore", "teacherscore", "teacherscores"),
    )
)
_LABEL_NAMES = frozenset(
    (
        *("label", "labels", "gold", "golds", "goldlabel", "goldlabels", "relevance", "relevances", "relevancy", "rel"),
        *("relevant", "grade", "grades", "judgement", "judgment", "judgements", "judgments", "entailmentjudgment"),
        *("entailmentlabel", "entailment", "similar", "duplicate", "paraphrase", "selected"),
        *(f"is{word}" for word in ("duplicate", "selected", "relevant", "paraphrase", "positive", "similar", "match")),
        *("iscorrect", "isanswer", "isentailment", "issame", "isgold"),
    )
)
_NEGATIVE = re.compile(
    r"((hard|soft|easy|random|bm25)?(neg|negs|negative|negatives|rejected|hn)"
    r"(text|passage|document|doc|ctx|context|answer|response|sentence|example|image|imagepath|target)?|(hard)?n)s?\d*"
)
# The last word decides: doc_id, query-id, queryId, but not `paid`. pandas writes its index as `Unnamed: 0`.
_ID = re.compile(r"(.*[_\-\s.])?(id|ids|idx|index|uid|uuid|guid)|[qpdscr]id|docid|unnamed:.*", re.IGNORECASE)
_CAMEL_ID = re.compile(r".*[a-z](Id|ID|Idx)s?")


_SUFFIX = re.compile(r"(text|images?(path)?s?)$")
_LINKS = "names pictures by URL, which are not downloaded: fetch them before, as img2dataset does"


class Content(Enum):
    """What a column holds in the first rows."""

    text = "texts"
    picture = "pictures"
    number = "numbers"
    empty = "nothing"
    other = "other values"


@dataclass(frozen=True, slots=True)
class TextColumns:
    """The columns of query, positive and negatives in this order; fewer where there are fewer columns of texts."""

    names: list[str]
    by_name: bool  # at least one role is known by its name; else the order of the columns decides
    are_pairs: bool = False  # two columns of one kind, such as sentence1 and sentence2


class UnclearColumns(Exception):
    """Columns whose roles do not follow from their names. The text is the reason; `example` are possible columns."""

    def __init__(self, reason: str, example: Sequence[str]) -> None:
        super().__init__(reason)
        self.example = list(example)


def normalized(name: str) -> str:
    """A name without case, underscores, hyphens and spaces."""
    return re.sub(r"[_\-\s]", "", name.casefold())


def find_column(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The column with the first of these normalized names that one has; None for none."""
    by_name: dict[str, str] = {}
    for name in names:
        by_name.setdefault(normalized(name), name)
    return next((by_name[name] for name in known if name in by_name), None)


def is_id(name: str) -> bool:
    """Whether a column of this name holds ids: id, _id, idx, index, qid, doc_id, queryId, guid, ..."""
    stripped = name.strip()
    return _ID.fullmatch(stripped) is not None or _CAMEL_ID.fullmatch(stripped) is not None


def is_score(name: str) -> bool:
    """Whether a column of this name holds scores or labels."""
    return normalized(name) in _SCORE_NAMES | _LABEL_NAMES


def is_label(name: str) -> bool:
    """Whether a column of this name holds labels, which may be the names of classes."""
    return normalized(name) in _LABEL_NAMES


def is_negative(name: str) -> bool:
    """Whether a column of this name holds negatives: negative, neg, hard_negative_3, rejected, ..."""
    return _NEGATIVE.fullmatch(normalized(name)) is not None


def is_query(name: str) -> bool:
    """Whether a column of this name can only be the query."""
    return _is_in(name, QUERY_NAMES[0])


def is_positive(name: str) -> bool:
    """Whether a column of this name can only be a positive."""
    return _is_in(name, POSITIVE_NAMES[0])


def is_document(name: str) -> bool:
    """Whether a column of this name is a positive where a row has no better name: answer, passage, text, ..."""
    return _is_in(name, POSITIVE_NAMES[1])


def has_role(name: str) -> bool:
    """Whether the table knows this name."""
    groups = (*QUERY_NAMES, *POSITIVE_NAMES, *PAIR_NAMES)
    return is_id(name) or is_score(name) or is_negative(name) or any(_is_in(name, group) for group in groups)


def content_of(name: str, rows: Iterable[Mapping[str, Any]], *, is_cells: bool) -> Content:
    """What a column holds in these rows; the cells of CSV and TSV files are texts that may be numbers."""
    content = Content.empty
    for row in rows:
        value = row.get(name)
        if is_cells and isinstance(value, str):
            with contextlib.suppress(values.BadRow):  # reported with its line when the row is read
                value = values.list_in_cell(value)
            number = values.parse_cell(value)
            value = value if isinstance(number, bool) else number  # True and False may be answers
        while isinstance(value, list):
            value = value[0] if value else None
        if value is None:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            content = Content.number if content is Content.empty else content
        elif any(values.picture_values(value)):
            is_readable = not any(picture.is_url for picture in values.picture_values(value))
            content = Content.picture if is_readable else Content.other
            if is_readable:
                return content
        elif values.holds_text(value):
            return Content.text
        else:
            content = Content.other
    return content


def unnamed_score(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], chosen: TextColumns, *, is_cells: bool
) -> str | None:
    """A column of an unknown name that is likely to hold labels or scores of the chosen texts; None for none.

    It holds nothing but 0 and 1, or true and false, both of them; or different numbers beside a pair of sentences.
    """
    for name in names:
        if name in chosen.names or is_id(name) or has_role(name):
            continue
        found = [row[name] for row in rows if row.get(name) is not None]
        numbers = [values.parse_cell(value) if is_cells else value for value in found]
        if not all(isinstance(number, bool | int | float) for number in numbers):
            continue
        different = set(numbers)
        if different == {0, 1} or (chosen.are_pairs and len(different) > 1):
            return name
    return None


def choose_text_columns(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], *, is_cells: bool = False
) -> TextColumns:
    """The columns of texts and their roles, by name, in any order; by order for two columns of unknown names.

    Ids and columns whose first rows hold no texts have no role. Raises UnclearColumns where two columns may have the
    same role, or more than two have unknown names.
    """
    contents = {name: content_of(name, rows, is_cells=is_cells) for name in names if not is_id(name)}
    negatives = [name for name in contents if is_negative(name)]
    pictures = [name for name, content in contents.items() if content is Content.picture and not has_role(name)]
    readable = (Content.text, Content.picture)
    texts = [name for name, content in contents.items() if content in readable and name not in negatives]
    others = [name for name in contents if name not in (*negatives, *pictures)]
    queries, positives = (_of_role(others, groups, contents) for groups in (QUERY_NAMES, POSITIVE_NAMES))
    if pictures and not any(map(is_positive, positives)):
        # A picture and its text: the text is the query. {"query", "answer", "image"} is not clear, but that of ColPali.
        if len(positives) == 1 and not queries:
            queries, positives = positives, pictures
        elif not positives or "image_filename" in names:
            positives = pictures
        else:
            positives = [*positives, *pictures]
    is_specific = any(is_query(name) or is_positive(name) for name in (*queries, *positives))
    pairs = [] if is_specific else _pairs(others)
    if len(pairs) == 1:
        chosen = TextColumns([*pairs[0], *negatives], by_name=True, are_pairs=True)
        return _require_texts(chosen, contents, rows)
    for role, candidates, others in (("query", queries, positives), ("positive", positives, queries)):
        if len(candidates) > 1:
            example = [candidates[0], (others or [n for n in texts if n not in candidates] or candidates[1:])[0]]
            raise UnclearColumns(
                f"the columns {' and '.join(candidates)} may each be the {role}",
                example if role == "query" else example[::-1],
            )
    rest = [name for name in texts if name not in (*queries, *positives) and not is_score(name)]
    if not queries and not positives:
        usable = [name for name, content in contents.items() if content is not Content.other]
        # Of two columns, both are meant, and the row that holds no text is reported.
        chosen = _by_order(usable if len(usable) == 2 and not negatives else rest, negatives)
        return _require_texts(chosen, contents, rows)
    # A role that no column of texts has: the only other column of texts, or one of its names that holds numbers.
    if not rest and len(queries) + len(positives) < 2:
        unused = [name for name, content in contents.items() if content in (Content.number, Content.empty)]
        rest = _named(unused, POSITIVE_NAMES if queries else QUERY_NAMES)
        links = [name for name in contents if contents[name] is Content.other and _names_pictures(name, rows)]
        if not rest and links:
            raise UnclearColumns(f"column {links[0]!r} {_LINKS}", [*queries, *positives, links[0]])
    if len(queries) + len(positives) < 2 and len(rest) > 1:
        missing = "query" if not queries else "positive"
        example = [rest[0], positives[0]] if not queries else [queries[0], rest[0]]
        raise UnclearColumns(f"which of the columns {', '.join(rest)} is the {missing} is not known", example)
    first_two = [*(queries or rest[:1]), *(positives or rest[:1])]
    chosen = TextColumns([*dict.fromkeys(first_two), *negatives], by_name=True, are_pairs=are_pair(first_two))
    return _require_texts(chosen, contents, rows)


def written_columns(names: Iterable[object]) -> str:
    """Columns as the value of an option: `[question,answer]`, with quotation marks where a name needs them."""
    written = [
        name if re.fullmatch(r"[\w.-]+", name) else "'" + name.replace("'", "\\'") + "'" for name in map(str, names)
    ]
    return f"[{','.join(written)}]"


def are_pair(names: Sequence[str]) -> bool:
    """Whether two columns are sentences of equal rank: sentence1 and sentence2, or premise and hypothesis."""
    pair = tuple(normalized(name) for name in names[:2])
    return pair in PAIR_NAMES or pair == ("premise", "hypothesis")


def _by_order(texts: list[str], negatives: list[str]) -> TextColumns:
    if len(texts) > 2:
        raise UnclearColumns(f"the names {list_names(texts)} do not say which is the query and the positive", texts[:2])
    return TextColumns([*texts, *(negatives if len(texts) == 2 else [])], by_name=False)


def _of_role(names: Sequence[str], groups: Sequence[frozenset[str]], contents: Mapping[str, Content]) -> list[str]:
    """The columns with a name of the first group that has any with texts, or with values of another form.

    Numbers count only where nothing else has a name of the first group: {"positive": 1} is no text, and neither is
    {"code": 404} beside an answer.
    """
    for index, group in enumerate(groups):
        matches = [name for name in names if _is_in(name, group) and contents[name] is not Content.empty]
        readable = [name for name in matches if contents[name] is not Content.number]
        if readable or (matches and index == 0):
            return readable or matches
    return []


def _require_texts(
    chosen: TextColumns, contents: Mapping[str, Content], rows: Sequence[Mapping[str, Any]]
) -> TextColumns:
    """The columns, if their values can be texts. Left out, a column of negatives would be lost without a word."""
    for name in chosen.names:
        if contents[name] is Content.other:
            value = next(row[name] for row in rows if row.get(name) not in (None, []))
            while isinstance(value, list) and value and not values.holds_text(value[0]):
                value = value[0]
            problem = values.without_text(value) if isinstance(value, dict) else f"holds {describe_value(value)}"
            if any(values.picture_values(value)):
                problem = _LINKS
            readable = [other for other in contents if contents[other] is Content.text and other != name]
            raise UnclearColumns(f"column {name!r} {problem}", readable if readable[1:] else chosen.names[:2])
    return chosen


def _names_pictures(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(any(values.picture_values(row.get(name))) for row in rows)


def _named(names: Sequence[str], groups: Sequence[frozenset[str]]) -> list[str]:
    """The columns with a name of the first group that has any."""
    for group in groups:
        if matches := [name for name in names if _is_in(name, group)]:
            return matches
    return []


def _is_in(name: str, group: Iterable[str]) -> bool:
    """Whether a group has a name, or the name without `text` or `image` at its end: question_text, Positive Image."""
    key = normalized(name)
    return key in group or _SUFFIX.sub("", key) in group


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    by_name = {normalized(name): name for name in names}
    return [(by_name[first], by_name[second]) for first, second in PAIR_NAMES if {first, second} <= by_name.keys()]
