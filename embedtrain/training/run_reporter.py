"""The account a run gives of itself: when it was under way, a sample's vectors before and after, and report.html."""

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.watchdog.activity import activity
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.tracking.report.page import REPORT_FILE, write_report
from embedtrain.tracking.report.sample import AFTER, BEFORE, Sample, read_texts, write_texts, write_vectors
from embedtrain.tracking.sessions import record_end, record_start
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.state import TrainState


class RunReporter:
    """What is kept beside a run's figures, and the report at its end. Nothing that fails here ends the run.

    All methods are collectives but entering and leaving.

    Args:
        recipe: `tracking.report` says whether there is a report, and a sample for it.
        run_dir: where it is kept.
        world: the ranks; the first one writes.
        encoder: the live model.
        tracker: tells what is going on.
        state: where the run stands.
        total_steps: how far it is to go.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDirectory,
        world: World,
        encoder: SentenceEncoder,
        tracker: Tracker,
        state: TrainState,
        total_steps: int,
    ) -> None:
        self._wanted, self._run_dir, self._world = recipe.tracking.report, run_dir, world
        self._encoder, self._tracker, self._state = encoder, tracker, state
        self._total_steps = total_steps
        self._warned = False

    def __enter__(self) -> "RunReporter":
        """Note that the run is under way."""
        device = self._world.device
        devices = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

        def note() -> None:
            record_start(
                self._run_dir.sessions,
                step=self._state.step,
                total_steps=self._total_steps,
                ranks=self._world.size,
                devices=devices,
                from_scratch=self._anew,
            )

        self._unless_it_fails("sessions.jsonl", note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Note what the run failed with, if it did."""
        if error is not None:
            said = f"{type(error).__name__}: {error}"
            self._unless_it_fails("sessions.jsonl", lambda: self._ended("failed", error=said))

    def before(self, choose: Callable[[], Sample]) -> None:
        """Encode a sample before the first step, where training begins anew.

        Args:
            choose: makes the sample; called on the first rank.
        """
        if not self._wanted or not self._anew:
            return

        def chosen() -> Sample:
            sample = choose()
            write_texts(self._run_dir.sample, sample)
            return sample

        self._encode(chosen, BEFORE, step=0)

    def after(self, step: int) -> None:
        """Encode the same sample with the weights that were exported, those of `step`, and note that all is done."""
        if self._wanted:
            self._encode(lambda: read_texts(self._run_dir.sample), AFTER, step)
        self._unless_it_fails("sessions.jsonl", lambda: self._ended("finished", exported=step))
        self._report()

    def stopped(self) -> None:
        """Note that the run was asked to stop."""
        self._unless_it_fails("sessions.jsonl", lambda: self._ended("stopped"))
        self._report()

    @property
    def _anew(self) -> bool:
        return self._state.step == 0

    def _ended(self, how: str, *, error: str | None = None, exported: int | None = None) -> None:
        record_end(self._run_dir.sessions, how, step=self._state.step, error=error, exported=exported)

    def _encode(self, sample_of: Callable[[], Sample | None], which: str, step: int) -> None:
        """The vectors of the sample, if there is one, on all ranks; the first one writes them."""
        with activity("encoding the sample of the report"):
            found: list[Sample] = []

            def look() -> None:
                sample = sample_of()
                if sample is not None and sample.texts:
                    found.append(sample)

            self._unless_it_fails("the sample of the report", look)
            sample = self._world.broadcast(found[0] if found else None)
            if sample is None:
                return
            try:
                vectors = self._encoded(sample).cpu().numpy()
            except TrainingError as error:  # on all ranks alike: a vector is not finite
                self._warn("the sample of the report", error)
                return
            directory = self._run_dir.sample
            self._unless_it_fails(str(directory), lambda: write_vectors(directory, which, vectors, step))

    def _encoded(self, sample: Sample) -> Tensor:
        """Float32 [n, D], on every rank."""
        texts = sample.texts
        vectors: Tensor | None = None
        for length in dict.fromkeys(text.max_length for text in texts):
            places = [place for place, text in enumerate(texts) if text.max_length == length]
            some = [texts[place] for place in places]
            made = self._encoder.encode_all(
                [f"{text.before}{text.text}{text.after}" for text in some],
                max_length=length,
                label="the sample of the report",
                existing_prompt=[text.before for text in some],
            )
            if vectors is None:
                vectors = made.new_empty((len(texts), made.shape[1]))
            vectors[torch.tensor(places, device=made.device)] = made
        assert vectors is not None
        return vectors

    def _report(self) -> None:
        """Write the page; the other ranks wait, so that none of them ends before the first one."""
        if not self._wanted:
            return
        path = self._run_dir.path / REPORT_FILE

        def write() -> None:
            write_report([self._run_dir.path], path)
            self._tracker.note(f"report: {path}")

        with activity("writing the report"):
            self._unless_it_fails(str(path), write)
            self._world.barrier()

    def _unless_it_fails(self, what: str, do: Callable[[], None]) -> None:
        """Do it on the first rank; whatever it fails with is told, and the run goes on."""
        if not self._world.is_main:
            return
        try:
            do()
        except Exception as error:  # an account of the run is never worth the run
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._tracker.warn(f"{what} could not be made, and the run goes on: {type(error).__name__}: {error}")
        self._warned = True
