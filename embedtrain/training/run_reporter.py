"""What the report of a run needs: its sessions, and vectors of a sample of texts before and after training.

The sample is of evaluation sets and of training rows. It is spread evenly over them, and does not depend on the number
of ranks.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import LossConfig
from embedtrain.config.row_requirements import ScoreRequirement
from embedtrain.data.images.item import Picture, item_parts, join_parts
from embedtrain.data.rows import NO_PROMPT, Example, Prompt
from embedtrain.data.train_data import TrainData
from embedtrain.data.types import TextRole
from embedtrain.distributed.watchdog.watchdog import activity
from embedtrain.errors import TrainingError
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
)
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.report.page import REPORT_FILE, write_report
from embedtrain.report.runs import read_sample
from embedtrain.report.sample import (
    AFTER,
    BEFORE,
    SAMPLE_TYPES,
    THUMBNAILS_FILE,
    Pair,
    PairRelation,
    Role,
    Sample,
    SampleText,
    read_texts,
    write_texts,
    write_thumbnails,
    write_vectors,
)
from embedtrain.report.sample_section import shown_pictures
from embedtrain.tracking.sessions import SessionClock, record_end, record_start
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.inputs import Run, RunLength
from embedtrain.training.state import TrainState


class RunReporter:
    """Records sessions and a sample of a run, and writes its report at the end. Failures only cause a warning.

    All methods except entering and leaving are collectives.
    """

    def __init__(
        self,
        run: Run,
        encoder: SentenceEncoder,
        tracker: Tracker,
        state: TrainState,
        length: RunLength,
    ) -> None:
        self._run, self._encoder, self._tracker, self._state, self._length = run, encoder, tracker, state, length
        has_one_vector = load_kind(run.recipe.model.kind).has_one_vector and not encoder.score.kind
        self._has_sample = run.recipe.tracking.report and has_one_vector
        self._starts_at_zero = state.step == 0
        self._has_warned = False
        self._clock = SessionClock()

    def __enter__(self) -> "RunReporter":
        """Record the start of a session."""
        device = self._run.world.device
        devices = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

        def record() -> None:
            record_start(
                self._run.run_dir.sessions,
                self._clock,
                step=self._state.step,
                total_steps=self._length.steps,
                steps_per_epoch=self._length.steps_per_epoch,
                ranks=self._run.world.size,
                devices=devices,
                from_scratch=self._starts_at_zero,
            )

        self._on_main_rank("sessions.jsonl", record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Record the error that ends the session, if any."""
        if error is not None:
            text = f"{type(error).__name__}: {error}"
            self._on_main_rank("sessions.jsonl", lambda: self._record_end("failed", error=text))

    def encode_before_training(self, choose: Callable[[], Sample]) -> None:
        """Encode a sample before the first step, unless an earlier session did."""
        if not self._has_sample or not self._starts_at_zero:
            return

        def choose_and_write() -> Sample:
            sample = choose()
            write_texts(self._run.run_dir.sample, sample)
            return sample

        self._encode(choose_and_write, BEFORE, step=0)

    def report_finished(self, step: int, check: str) -> None:
        """Encode the same sample with the exported weights, those of `step`, and write the report with their check."""
        if self._has_sample:
            self._encode(lambda: read_texts(self._run.run_dir.sample), AFTER, step)
        self._on_main_rank("sessions.jsonl", lambda: self._record_end("finished", exported=step, check=check))
        self._write_report()

    def report_stopped(self) -> None:
        """Record that a signal stopped the run, and write the report."""
        self._on_main_rank("sessions.jsonl", lambda: self._record_end("stopped"))
        self._write_report()

    def _record_end(self, how: str, **details: Any) -> None:
        record_end(self._run.run_dir.sessions, self._clock, how, step=self._state.step, **details)

    def _encode(self, read_sample: Callable[[], Sample | None], which: str, step: int) -> None:
        """Encode the sample on all ranks, if there is one, and write its embeddings on rank 0."""
        with activity("encoding the sample of the report"):
            samples: list[Sample] = []

            def read() -> None:
                sample = read_sample()
                if sample is not None and sample.texts:
                    samples.append(sample)

            self._on_main_rank("the sample of the report", read)
            sample = self._run.world.broadcast(samples[0] if samples else None, *SAMPLE_TYPES)
            if sample is None:
                return
            try:
                embeddings = self._embeddings(sample).cpu().numpy()
            except TrainingError as error:  # on all ranks: an embedding is not finite
                self._warn("the sample of the report", error)
                return
            directory = self._run.run_dir.sample
            self._on_main_rank(str(directory), lambda: write_vectors(directory, which, embeddings, step))

    def _embeddings(self, sample: Sample) -> Tensor:
        """Float32 [n, D], on every rank."""
        embeddings: Tensor | None = None
        roles_differ = self._encoder.tokenizer.layout.roles_differ
        is_document = [roles_differ and text.role is not Role.query for text in sample.texts]
        groups = list(zip((text.max_length for text in sample.texts), is_document, strict=True))
        for length, of_documents in dict.fromkeys(groups):
            indices = [index for index, group in enumerate(groups) if group == (length, of_documents)]
            texts = [sample.texts[index] for index in indices]
            encoded = self._encoder.encode_all(
                [f"{text.before}{text.text}{text.after}" for text in texts],
                role=TextRole.document if of_documents else TextRole.query,
                max_length=length,
                label="encoding the sample of the report",
                existing_prompt=[text.before for text in texts],
            )
            if embeddings is None:
                embeddings = encoded.new_empty((len(sample.texts), encoded.shape[1]))
            embeddings[torch.tensor(indices, device=encoded.device)] = encoded
        assert embeddings is not None
        return embeddings

    def _write_report(self) -> None:
        """Write report.html on rank 0; the other ranks wait, so that none of them ends earlier."""
        if not self._run.recipe.tracking.report:
            return
        path = self._run.run_dir.path / REPORT_FILE
        directory = self._run.run_dir.sample
        self._on_main_rank(str(directory / THUMBNAILS_FILE), lambda: _write_thumbnails(directory))

        def write() -> None:
            write_report([self._run.run_dir.path], path)
            self._tracker.note(f"report: {path}")

        with activity("writing the report"):
            self._on_main_rank(str(path), write)
            self._run.world.barrier()

    def _on_main_rank(self, what: str, action: Callable[[], None]) -> None:
        """Run an action on rank 0; any failure becomes a warning."""
        if not self._run.world.is_main:
            return
        try:
            action()
        except Exception as error:  # no record is worth losing the run
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            self._tracker.warn(f"{what} could not be written, training continues: {type(error).__name__}: {error}")
        self._has_warned = True


def _write_thumbnails(directory: Path) -> None:
    """Small copies of the pictures that the page shows."""
    encoded, _ = read_sample(directory)
    if encoded is not None:
        write_thumbnails(directory, shown_pictures(encoded))


# At most about 450 texts in total, each of limited length whatever the model's maximal length.
HELD_OUT_QUERIES = 32
HELD_OUT_DOCUMENTS = 96  # besides judged documents
TRAINING_ROWS = 48
LABELLED_TEXTS = 60
MAX_SETS, MAX_SOURCES = 8, 12
JUDGED_PER_QUERY = 2  # relevant documents of a query, and as many irrelevant ones
TEXT_LENGTH = 2000  # characters


@dataclass
class _SampleBuilder:
    """Collects texts and pairs; a text that occurs twice in one set or source is added once."""

    texts: list[SampleText] = field(default_factory=list)
    pairs: dict[Pair, None] = field(default_factory=dict)
    _numbers: dict[SampleText, int] = field(default_factory=dict)

    def add(self, text: SampleText) -> int:
        """The index of the text."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def pair(self, first: int, second: int, relation: PairRelation) -> None:
        self.pairs[Pair(first, second, relation)] = None


@dataclass(frozen=True)
class _Origin:
    """The settings of all texts of a set or source."""

    name: str
    held_out: bool
    query_prompt: Prompt = NO_PROMPT
    document_prompt: Prompt = NO_PROMPT
    query_max_length: int | None = None
    document_max_length: int | None = None

    def query(self, text: str, *, role: Role = Role.query, label: object = None) -> SampleText:
        """A text with the prompt and maximal length of queries."""
        return self._sample_text(text, role, self.query_prompt, self.query_max_length, label)

    def document(self, text: str) -> SampleText:
        """A text with the prompt and maximal length of documents."""
        return self._sample_text(text, Role.document, self.document_prompt, self.document_max_length, None)

    def _sample_text(self, text: str, role: Role, prompt: Prompt, length: int | None, label: object) -> SampleText:
        label = None if label is None else str(label)[:80]
        cut = join_parts(part if isinstance(part, Picture) else part[:TEXT_LENGTH] for part in item_parts(text))
        return SampleText(cut, role, self.name, self.held_out, prompt.prefix, prompt.suffix, length, label)


def choose_sample(
    sets: Sequence[LoadedSet], data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> Sample:
    """The sample of a run: of its evaluation sets and training rows, given the loss of each source.

    `prompts` are the model's, by name: `query` and `document`.
    """
    sample = _SampleBuilder()
    chosen_sets = [sets[i] for i in _evenly(len(sets), MAX_SETS)]
    for loaded in chosen_sets:
        _add_set(sample, loaded, prompts, max(4, HELD_OUT_QUERIES // len(chosen_sets)))
    sources = _evenly(len(data.stores), MAX_SOURCES)
    for source in sources:
        graded = losses[source].row_requirements.scores is ScoreRequirement.pairs
        _add_source(sample, data, source, max(4, TRAINING_ROWS // len(sources)), graded)
    return Sample(sample.texts, list(sample.pairs))


def _evenly(length: int, count: int) -> list[int]:
    """At most `count` indices below `length`, one of each part: a function of the two numbers.

    Not the first of each part: every third text of a file may be of one class.
    """
    if length <= count:
        return list(range(length))
    generator = random.Random(length)
    bounds = [part * length // count for part in range(count + 1)]
    return [generator.randrange(start, end) for start, end in itertools.pairwise(bounds)]


def _add_set(sample: _SampleBuilder, loaded: LoadedSet, prompts: Mapping[str, str], count: int) -> None:
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
            _add_retrieval(sample, data, origin, count)
        case ScoredPairs() as data:
            by_score = [i for _, i in sorted((score, i) for i, score in enumerate(data.scores))]
            indices = [by_score[i] for i in _evenly(len(by_score), 3 * count)]
            _add_graded(sample, [(origin, data.first[i], data.second[i], data.scores[i]) for i in indices])
        case LabelledPairs() as data:
            for i in _evenly(len(data.labels), 3 * count):
                relation = PairRelation.same if data.labels[i] else PairRelation.different
                _add_pair(sample, origin, data.first[i], data.second[i], relation)
        case Bitext() as data:
            for i in _evenly(len(data.first), 2 * count):
                _add_pair(sample, origin, data.first[i], data.second[i], PairRelation.positive)
        case ClassificationSet() as data:
            for i in _evenly(len(data.texts), LABELLED_TEXTS):
                sample.add(origin.query(data.texts[i], role=Role.text, label=data.labels[i]))
        case ClusteringSet() as data:
            for i in _evenly(len(data.texts), LABELLED_TEXTS):
                sample.add(origin.query(data.texts[i], role=Role.text, label=data.labels[i][0]))


def _add_retrieval(sample: _SampleBuilder, data: RetrievalSet, origin: _Origin, count: int) -> None:
    """Some judged queries, judged documents of theirs, and other documents as distractors."""
    judged = [query for query in data.judged_queries if any(gain > 0 for gain in data.judgements[query].values())]
    queries = [judged[i] for i in _evenly(len(judged), count)]
    names: set[str] = set()
    for query in queries:
        gains = data.judgements[query].items()
        names.update([document for document, gain in gains if gain > 0][:JUDGED_PER_QUERY])
        names.update([document for document, gain in gains if gain <= 0][:JUDGED_PER_QUERY])
    ids = data.documents.ids
    indices = {name: i for i, name in enumerate(ids) if name in names}
    num_others = max(count, HELD_OUT_DOCUMENTS * count // HELD_OUT_QUERIES)
    indices |= {ids[i]: i for i in _evenly(len(ids), num_others)}
    documents = {name: sample.add(origin.document(data.documents.texts[i])) for name, i in indices.items()}
    for query in queries:
        text = sample.add(origin.query(data.queries[query]))
        for document, gain in data.judgements[query].items():
            if document in documents:
                sample.pair(text, documents[document], PairRelation.positive if gain > 0 else PairRelation.negative)


def _add_pair(sample: _SampleBuilder, origin: _Origin, first: str, second: str, relation: PairRelation) -> None:
    left, right = (sample.add(origin.query(text, role=Role.text)) for text in (first, second))
    if left != right:
        sample.pair(left, right, relation)


def _add_graded(sample: _SampleBuilder, pairs: Sequence[tuple[_Origin, str, str, float]]) -> None:
    """Pairs with scores, classified by thirds of the range of the scores."""
    if not pairs:
        return
    scores = [score for *_, score in pairs]
    low, high = min(scores), max(scores)
    for origin, first, second, score in pairs:
        level = (score - low) / (high - low) if high > low else 1.0
        relation = PairRelation.low if level < 1 / 3 else PairRelation.middle if level < 2 / 3 else PairRelation.high
        _add_pair(sample, origin, first, second, relation)


def _add_source(sample: _SampleBuilder, data: TrainData, source: int, count: int, graded: bool) -> None:
    store, text_format = data.stores[source], data.settings[source].text_format
    scored: list[tuple[_Origin, str, str, float]] = []
    for row in _evenly(len(store), count):
        example = store[row]
        lengths = (text_format.query_max_length, text_format.document_max_length)
        origin = _Origin(store.report.name, False, *text_format.prompts(example), *lengths)
        if not example.positives.texts:
            sample.add(origin.query(example.query, role=Role.text, label=example.label))
        elif graded and example.positives.scores:
            scored += _scored(origin, example)
        else:
            _add_row(sample, origin, example)
    _add_graded(sample, scored)


def _scored(origin: _Origin, example: Example) -> Iterator[tuple[_Origin, str, str, float]]:
    for documents in (example.positives, example.negatives):
        judged = zip(documents.texts[:JUDGED_PER_QUERY], documents.scores[:JUDGED_PER_QUERY], strict=True)
        for document, score in judged:
            yield origin, example.query, document, score


def _add_row(sample: _SampleBuilder, origin: _Origin, example: Example) -> None:
    """A query with its first positive and hard negatives."""
    query = sample.add(origin.query(example.query))
    sample.pair(query, sample.add(origin.document(example.positives.texts[0])), PairRelation.positive)
    for negative in example.negatives.texts[:JUDGED_PER_QUERY]:
        sample.pair(query, sample.add(origin.document(negative)), PairRelation.negative)
