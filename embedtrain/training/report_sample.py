"""The texts that a report compares before and after training: held-out texts and training rows, sampled evenly.

The sample is a function of the sets and rows, not of the number of ranks.
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

# At most about 450 texts of bounded length.
HELD_OUT_QUERIES = 32
HELD_OUT_DOCUMENTS = 96  # besides judged documents
TRAINING_ROWS = 48
LABELLED_TEXTS = 60
MAX_SETS, MAX_SOURCES = 8, 12
JUDGED_PER_QUERY = 2  # documents of a query judged relevant, and the same number judged not relevant
TEXT_LENGTH = 2000  # characters


@dataclass
class _SampleBuilder:
    """Collects texts and pairs; a text that occurs twice in a set or source is added once."""

    texts: list[SampleText] = field(default_factory=list)
    pairs: dict[Pair, None] = field(default_factory=dict)
    _numbers: dict[SampleText, int] = field(default_factory=dict)

    def add(self, text: SampleText) -> int:
        """Return the index of the text."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def pair(self, first: int, second: int, relation: PairRelation) -> None:
        self.pairs[Pair(first, second, relation)] = None


@dataclass(frozen=True)
class _Origin:
    """Properties of all texts of a set or source."""

    name: str
    held_out: bool
    query_prompt: Prompt = NO_PROMPT
    document_prompt: Prompt = NO_PROMPT
    query_max_length: int | None = None
    document_max_length: int | None = None

    def query(self, text: str, *, role: Role = Role.query, label: object = None) -> SampleText:
        """A text that is encoded like queries."""
        return self._text(text, role, self.query_prompt, self.query_max_length, label)

    def document(self, text: str) -> SampleText:
        """A text that is encoded like documents."""
        return self._text(text, Role.document, self.document_prompt, self.document_max_length, None)

    def _text(self, text: str, role: Role, prompt: Prompt, length: int | None, label: object) -> SampleText:
        label_text = None if label is None else str(label)[:80]
        return SampleText(
            text[:TEXT_LENGTH], role, self.name, self.held_out, prompt.prefix, prompt.suffix, length, label_text
        )


def choose_sample(
    sets: Sequence[LoadedSet], data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> Sample:
    """The sample of a run; `losses` has the loss of each source."""
    chosen = _SampleBuilder()
    chosen_sets = [sets[index] for index in _evenly(len(sets), MAX_SETS)]
    for loaded in chosen_sets:
        _add_set(chosen, loaded, prompts, count=max(4, HELD_OUT_QUERIES // len(chosen_sets)))
    sources = _evenly(len(data.stores), MAX_SOURCES)
    for source in sources:
        graded = row_requirements(losses[source]).scores is ScoreRequirement.pairs
        _add_source(chosen, data, source, max(4, TRAINING_ROWS // len(sources)), graded)
    return Sample(chosen.texts, list(chosen.pairs))


def _evenly(length: int, count: int) -> list[int]:
    """At most `count` of `length` indices, one per interval, drawn by a fixed seed because files may be periodic."""
    if length <= count:
        return list(range(length))
    generator = random.Random(length)
    ends = [index * length // count for index in range(count + 1)]
    return [generator.randrange(start, end) for start, end in itertools.pairwise(ends)]


def _add_set(chosen: _SampleBuilder, loaded: LoadedSet, prompts: Mapping[str, str], count: int) -> None:
    query_prompt, document_prompt = (
        prompts.get(name, "") if set_prompt is None else set_prompt
        for name, set_prompt in (("query", loaded.query_prompt), ("document", loaded.document_prompt))
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
            _add_retrieval(chosen, data, origin, count)
        case ScoredPairs() as data:
            by_score = [index for _, index in sorted((score, index) for index, score in enumerate(data.scores))]
            indices = [by_score[index] for index in _evenly(len(by_score), 3 * count)]
            _add_graded(
                chosen, [(origin, data.first[index], data.second[index], data.scores[index]) for index in indices]
            )
        case LabelledPairs() as data:
            for index in _evenly(len(data.labels), 3 * count):
                relation = PairRelation.same if data.labels[index] else PairRelation.different
                _add_pair(chosen, origin, data.first[index], data.second[index], relation)
        case Bitext() as data:
            for index in _evenly(len(data.first), 2 * count):
                _add_pair(chosen, origin, data.first[index], data.second[index], PairRelation.positive)
        case ClassificationSet() as data:
            for index in _evenly(len(data.texts), LABELLED_TEXTS):
                chosen.add(origin.query(data.texts[index], role=Role.text, label=data.labels[index]))
        case ClusteringSet() as data:
            for index in _evenly(len(data.texts), LABELLED_TEXTS):
                chosen.add(origin.query(data.texts[index], role=Role.text, label=data.labels[index][0]))


def _add_retrieval(chosen: _SampleBuilder, data: RetrievalSet, origin: _Origin, count: int) -> None:
    """Judged queries, their judged documents, and other documents for comparison."""
    judged = [query for query in data.judged_queries if any(gain > 0 for gain in data.judgements[query].values())]
    queries = [judged[index] for index in _evenly(len(judged), count)]
    judged_ids: set[str] = set()
    for query in queries:
        gains = data.judgements[query].items()
        judged_ids.update([document for document, gain in gains if gain > 0][:JUDGED_PER_QUERY])
        judged_ids.update([document for document, gain in gains if gain <= 0][:JUDGED_PER_QUERY])
    ids = data.documents.ids
    indices = {name: index for index, name in enumerate(ids) if name in judged_ids}
    num_others = max(count, HELD_OUT_DOCUMENTS * count // HELD_OUT_QUERIES)
    indices |= {ids[index]: index for index in _evenly(len(ids), num_others)}
    numbers = {name: chosen.add(origin.document(data.documents.texts[index])) for name, index in indices.items()}
    for query in queries:
        query_number = chosen.add(origin.query(data.queries[query]))
        for document, gain in data.judgements[query].items():
            if document in numbers:
                chosen.pair(
                    query_number, numbers[document], PairRelation.positive if gain > 0 else PairRelation.negative
                )


def _add_pair(chosen: _SampleBuilder, origin: _Origin, first: str, second: str, relation: PairRelation) -> None:
    first_number, second_number = (chosen.add(origin.query(text, role=Role.text)) for text in (first, second))
    if first_number != second_number:
        chosen.pair(first_number, second_number, relation)


def _add_graded(chosen: _SampleBuilder, pairs: Sequence[tuple[_Origin, str, str, float]]) -> None:
    """Pairs with scores, classified by thirds of the range of scores."""
    if not pairs:
        return
    scores = [score for *_, score in pairs]
    low, high = min(scores), max(scores)
    for origin, first, second, score in pairs:
        fraction = (score - low) / (high - low) if high > low else 1.0
        relation = (
            PairRelation.low if fraction < 1 / 3 else PairRelation.middle if fraction < 2 / 3 else PairRelation.high
        )
        _add_pair(chosen, origin, first, second, relation)


def _add_source(chosen: _SampleBuilder, data: TrainData, source: int, count: int, graded: bool) -> None:
    store, text_format = data.stores[source], data.settings[source].text_format
    scored: list[tuple[_Origin, str, str, float]] = []
    for row in _evenly(len(store), count):
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
