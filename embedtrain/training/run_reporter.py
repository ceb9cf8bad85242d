"""Records of a run for its report: sessions, embeddings of a sample before and after training, report.html."""

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import ModelKind, Recipe
from embedtrain.distributed.watchdog.activity import activity
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.report.page import REPORT_FILE, write_report
from embedtrain.report.sample import (
    AFTER,
    BEFORE,
    SAMPLE_TYPES,
    Sample,
    read_texts,
    write_texts,
    write_vectors,
)
from embedtrain.tracking.sessions import SessionClock, record_end, record_start
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.resume import RunStart


class RunLength(NamedTuple):
    """Optimizer steps of a run and of an epoch."""

    total_steps: int
    steps_per_epoch: float


class RunReporter:
    """Records sessions and a sample of a run, and writes its report at the end. Failures only cause a warning.

    All methods except entering and leaving are collectives.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDirectory,
        world: World,
        encoder: SentenceEncoder,
        tracker: Tracker,
        start: RunStart,
        run_length: RunLength,
    ) -> None:
        self._is_enabled, self._run_dir, self._world = recipe.tracking.report, run_dir, world
        # A cross-encoder has no vectors of texts.
        self._has_sample = recipe.tracking.report and recipe.model.kind is ModelKind.dense
        self._encoder, self._tracker, self._state = encoder, tracker, start.state
        self._starts_at_zero = start.resumed_step is None
        self._run_length = run_length
        self._has_warned = False
        self._clock = SessionClock()

    def __enter__(self) -> "RunReporter":
        """Record the start of a session."""
        device = self._world.device
        devices = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

        def record() -> None:
            record_start(
                self._run_dir.sessions,
                self._clock,
                step=self._state.step,
                total_steps=self._run_length.total_steps,
                steps_per_epoch=self._run_length.steps_per_epoch,
                ranks=self._world.size,
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
            write_texts(self._run_dir.sample, sample)
            return sample

        self._encode(choose_and_write, BEFORE, step=0)

    def report_finished(self, step: int) -> None:
        """Encode the same sample with the exported weights, those of `step`, and write the report."""
        if self._has_sample:
            self._encode(lambda: read_texts(self._run_dir.sample), AFTER, step)
        self._on_main_rank("sessions.jsonl", lambda: self._record_end("finished", exported=step))
        self._write_report()

    def report_stopped(self) -> None:
        """Record that a signal stopped the run, and write the report."""
        self._on_main_rank("sessions.jsonl", lambda: self._record_end("stopped"))
        self._write_report()

    def _record_end(self, how: str, *, error: str | None = None, exported: int | None = None) -> None:
        record_end(self._run_dir.sessions, self._clock, how, step=self._state.step, error=error, exported=exported)

    def _encode(self, read_sample: Callable[[], Sample | None], which: str, step: int) -> None:
        """Encode the sample on all ranks, if there is one, and write its embeddings on rank 0."""
        with activity("encoding the sample of the report"):
            samples: list[Sample] = []

            def read() -> None:
                sample = read_sample()
                if sample is not None and sample.texts:
                    samples.append(sample)

            self._on_main_rank("the sample of the report", read)
            sample = self._world.broadcast(samples[0] if samples else None, *SAMPLE_TYPES)
            if sample is None:
                return
            try:
                embeddings = self._embeddings(sample).cpu().numpy()
            except TrainingError as error:  # on all ranks: an embedding is not finite
                self._warn("the sample of the report", error)
                return
            directory = self._run_dir.sample
            self._on_main_rank(str(directory), lambda: write_vectors(directory, which, embeddings, step))

    def _embeddings(self, sample: Sample) -> Tensor:
        """Float32 [n, D], on every rank."""
        embeddings: Tensor | None = None
        for length in dict.fromkeys(text.max_length for text in sample.texts):
            indices = [index for index, text in enumerate(sample.texts) if text.max_length == length]
            texts = [sample.texts[index] for index in indices]
            encoded = self._encoder.encode_all(
                [f"{text.before}{text.text}{text.after}" for text in texts],
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
        if not self._is_enabled:
            return
        path = self._run_dir.path / REPORT_FILE

        def write() -> None:
            write_report([self._run_dir.path], path)
            self._tracker.note(f"report: {path}")

        with activity("writing the report"):
            self._on_main_rank(str(path), write)
            self._world.barrier()

    def _on_main_rank(self, what: str, action: Callable[[], None]) -> None:
        """Run an action on rank 0; any failure becomes a warning."""
        if not self._world.is_main:
            return
        try:
            action()
        except Exception as error:  # no record is worth losing the run
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            self._tracker.warn(f"{what} could not be written, training continues: {type(error).__name__}: {error}")
        self._has_warned = True
