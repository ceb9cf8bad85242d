"""Which texts a report looks at before and after training: a few held-out ones, and a few training rows.

A function of the sets and the rows alone, never of the number of ranks: taken evenly from all over them.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from embedtrain.config.losses import LossConfig
from embedtrain.config.row_requirements import ScoreRequirement, row_requirements
from embedtrain.data.text_format import NO_PROMPT, Prompt
from embedtrain.data.train_data import TrainData
from embedtrain.data.types import Example
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
)
from embedtrain.tracking.report.sample import Pair, PairRelation, Role, Sample, SampleText

# Texts in all: at most about 450. A text's cost is bounded as well, whatever length the model takes.
HELD_OUT_QUERIES = 32
HELD_OUT_DOCUMENTS = 96  # beside those that answer
TRAINING_ROWS = 48
LABELLED_TEXTS = 60
MAX_SETS, MAX_SOURCES = 8, 12
JUDGED_PER_QUERY = 2  # documents of a query that are judged relevant, and as many that are judged not to be
TEXT_LENGTH = 2000  # characters


@dataclass
class _SampleBuilder:
    """Texts and pairs as they come together; a text that stands twice in one set or source is one."""

    texts: list[SampleText] = field(default_factory=list)
    pairs: dict[Pair, None] = field(default_factory=dict)
    _numbers: dict[SampleText, int] = field(default_factory=dict)

    def add(self, text: SampleText) -> int:
        """The text's number."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def pair(self, first: int, second: int, relation: PairRelation) -> None:
        self.pairs[Pair(first, second, relation)] = None


@dataclass(frozen=True)
class _Origin:
    """What holds for all texts of a set or a source."""

    name: str
    held_out: bool
    query_prompt: Prompt = NO_PROMPT
    document_prompt: Prompt = NO_PROMPT
    query_max_length: int | None = None
    document_max_length: int | None = None

    def query(self, text: str, *, role: Role = Role.query, label: object = None) -> SampleText:
        """A text that is treated as queries are."""
        return self._made(text, role, self.query_prompt, self.query_max_length, label)

    def document(self, text: str) -> SampleText:
        """A text that is found."""
        return self._made(text, Role.document, self.document_prompt, self.document_max_length, None)

    def _made(self, text: str, role: Role, prompt: Prompt, length: int | None, label: object) -> SampleText:
        known = None if label is None else str(label)[:80]
        cut = text[:TEXT_LENGTH]
        return SampleText(cut, role, self.name, self.held_out, prompt.prefix, prompt.suffix, length, known)


def choose_sample(
    sets: Sequence[LoadedSet], data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> Sample:
    """The sample of a run; `losses` has the loss of each source."""
    chosen = _SampleBuilder()
    some = [sets[at] for at in _evenly(len(sets), MAX_SETS)]
    for loaded in some:
        _add_set(chosen, loaded, prompts, share=max(4, HELD_OUT_QUERIES // len(some)))
    sources = _evenly(len(data.stores), MAX_SOURCES)
    for source in sources:
        graded = row_requirements(losses[source]).scores is ScoreRequirement.pairs
        _add_source(chosen, data, source, max(4, TRAINING_ROWS // len(sources)), graded)
    return Sample(chosen.texts, list(chosen.pairs))


def _evenly(length: int, count: int) -> list[int]:
    """At most `count` of `length` places, one of each stretch: the same for the same numbers.

    Not the first of each: every third text of a file may be of one class.
    """
    if length <= count:
        return list(range(length))
    drawn = random.Random(length)
    ends = [place * length // count for place in range(count + 1)]
    return [drawn.randrange(start, end) for start, end in itertools.pairwise(ends)]


def _add_set(chosen: _SampleBuilder, loaded: LoadedSet, prompts: Mapping[str, str], share: int) -> None:
    query_prompt, document_prompt = (
        prompts.get(name, "") if own is None else own
        for name, own in (("query", loaded.query_prompt), ("document", loaded.document_prompt))
    )
    origin = _Origin(
        loaded.data.name,
        True,
        Prompt(query_prompt),
        Prompt(document_prompt),
        loaded.query_max_length,
        loaded.document_max_length,
    )
    match loaded.data:
        case RetrievalSet() as data:
            _add_retrieval(chosen, data, origin, share)
        case ScoredPairs() as data:
            by_score = [at for _, at in sorted((score, at) for at, score in enumerate(data.scores))]
            places = [by_score[at] for at in _evenly(len(by_score), 3 * share)]
            _add_graded(chosen, [(origin, data.first[at], data.second[at], data.scores[at]) for at in places])
        case LabelledPairs() as data:
            for at in _evenly(len(data.labels), 3 * share):
                known = PairRelation.same if data.labels[at] else PairRelation.different
                _add_pair(chosen, origin, data.first[at], data.second[at], known)
        case Bitext() as data:
            for at in _evenly(len(data.first), 2 * share):
                _add_pair(chosen, origin, data.first[at], data.second[at], PairRelation.positive)
        case ClassificationSet() as data:
            for at in _evenly(len(data.texts), LABELLED_TEXTS):
                chosen.add(origin.query(data.texts[at], role=Role.text, label=data.labels[at]))
        case ClusteringSet() as data:
            for at in _evenly(len(data.texts), LABELLED_TEXTS):
                chosen.add(origin.query(data.texts[at], role=Role.text, label=data.labels[at][0]))


def _add_retrieval(chosen: _SampleBuilder, data: RetrievalSet, origin: _Origin, share: int) -> None:
    """Some judged queries, what is judged of them, and other documents, to be told from those."""
    judged = [query for query in data.judged_queries if any(gain > 0 for gain in data.judgements[query].values())]
    queries = [judged[at] for at in _evenly(len(judged), share)]
    wanted: set[str] = set()
    for query in queries:
        gains = data.judgements[query].items()
        wanted.update([document for document, gain in gains if gain > 0][:JUDGED_PER_QUERY])
        wanted.update([document for document, gain in gains if gain <= 0][:JUDGED_PER_QUERY])
    ids = data.documents.ids
    places = {name: at for at, name in enumerate(ids) if name in wanted}
    others = max(share, HELD_OUT_DOCUMENTS * share // HELD_OUT_QUERIES)
    places |= {ids[at]: at for at in _evenly(len(ids), others)}
    numbers = {name: chosen.add(origin.document(data.documents.texts[at])) for name, at in places.items()}
    for query in queries:
        asked = chosen.add(origin.query(data.queries[query]))
        for document, gain in data.judgements[query].items():
            if document in numbers:
                chosen.pair(asked, numbers[document], PairRelation.positive if gain > 0 else PairRelation.negative)


def _add_pair(chosen: _SampleBuilder, origin: _Origin, first: str, second: str, relation: PairRelation) -> None:
    one, other = (chosen.add(origin.query(text, role=Role.text)) for text in (first, second))
    if one != other:
        chosen.pair(one, other, relation)


def _add_graded(chosen: _SampleBuilder, pairs: Sequence[tuple[_Origin, str, str, float]]) -> None:
    """Pairs with scores, which are told apart by thirds of the range that the scores have."""
    if not pairs:
        return
    scores = [score for *_, score in pairs]
    low, high = min(scores), max(scores)
    for origin, first, second, score in pairs:
        place = (score - low) / (high - low) if high > low else 1.0
        known = PairRelation.low if place < 1 / 3 else PairRelation.middle if place < 2 / 3 else PairRelation.high
        _add_pair(chosen, origin, first, second, known)


def _add_source(chosen: _SampleBuilder, data: TrainData, source: int, share: int, graded: bool) -> None:
    store, text_format = data.stores[source], data.settings[source].text_format
    scored: list[tuple[_Origin, str, str, float]] = []
    for row in _evenly(len(store), share):
        example = store[row]
        lengths = (text_format.query_max_length, text_format.document_max_length)
        origin = _Origin(store.report.name, False, *text_format.prompts(example), *lengths)
        if not example.positives:
            chosen.add(origin.query(example.query, role=Role.text, label=example.label))
        elif graded and example.positive_scores:
            scored += _scored(origin, example)
        else:
            _add_row(chosen, origin, example)
    _add_graded(chosen, scored)


def _scored(origin: _Origin, example: Example) -> Iterator[tuple[_Origin, str, str, float]]:
    documents = [*example.positives[:JUDGED_PER_QUERY], *example.negatives[:JUDGED_PER_QUERY]]
    scores = [*example.positive_scores[:JUDGED_PER_QUERY], *example.negative_scores[:JUDGED_PER_QUERY]]
    for document, score in zip(documents, scores, strict=True):
        yield origin, example.query, document, score


def _add_row(chosen: _SampleBuilder, origin: _Origin, example: Example) -> None:
    """A query with its first positive and hard negatives."""
    query = chosen.add(origin.query(example.query))
    chosen.pair(query, chosen.add(origin.document(example.positives[0])), PairRelation.positive)
    for negative in example.negatives[:JUDGED_PER_QUERY]:
        chosen.pair(query, chosen.add(origin.document(negative)), PairRelation.negative)
