"""Whole runs on real ranks: reported rates, garbage collection between steps, and batches prepared in advance."""

import contextlib
import gc
import itertools
import threading
import time
import unittest.mock

import pytest
import torch

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.distributed.world import World
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.formats.source import open_model_source
from embedtrain.models.build import build_encoder
from embedtrain.planning.flops import model_flops
from embedtrain.tracking.tracker import Tracker
from embedtrain.training import loop
from tests.runs import metric_rows, options, run
from tests.small import small_model


def flops_of_run(world: World, *arguments: str) -> tuple[list[float], list[list[int]], str]:
    """For each step: the reported FLOPs and the lengths of the texts of all ranks; and the standard output."""
    reported, lengths = [], []
    train_step = loop.train_step

    def recording_step(context, *batches, **kwargs):
        local_lengths = []
        for chunk in (chunk for batch in batches for chunk in batch.chunks):
            local_lengths += chunk.mask.sum(dim=1).tolist() if chunk.packing is None else chunk.packing.lengths
        lengths.append(sorted(itertools.chain(*world.gather(local_lengths))))
        report = train_step(context, *batches, **kwargs)
        reported.append(report.flops)
        return report

    loop.train_step = recording_step
    try:
        output = run(world, *arguments)
    finally:
        loop.train_step = train_step
    return reported, lengths, output


@pytest.mark.slow
def test_flops_count_real_tokens_for_any_ranks_and_chunks(ranks, run_inputs, tmp_path):
    flops = model_flops(build_encoder(open_model_source(small_model("xlm-roberta"))))
    results = {}
    for size, chunk_tokens in ((1, 1000), (2, 60)):  # one chunk; many chunks encoded twice
        more = ("train.steps=4", f"train.chunk_tokens={chunk_tokens}", "train.activation_tokens=0")
        out = tmp_path / str(size)
        reported, lengths, output = ranks(size, flops_of_run, *options(run_inputs, out, *more))[0]
        assert reported == pytest.approx([flops.of(torch.tensor(step_lengths)) for step_lengths in lengths])
        assert "mfu" not in output  # a CPU has no rate to which it could be relative
        results[size] = reported
        rows = [row for row in metric_rows(out) if "loss" in row]
        for row, step_flops in zip(rows, reported, strict=True):
            flops_per_second = row["model_tflops"] * 1e12 * size
            tokens = sum(lengths[row["step"] - 1])
            assert flops_per_second / row["tokens_per_s"] == pytest.approx(step_flops / tokens)
            assert "mfu" not in row
        measured = [row["step"] for row in rows if "communication" in row]
        assert measured == ([] if size == 1 else [3])
    assert results[2] == pytest.approx(results[1])


def run_with_pauses(world: World, *arguments: str) -> str:
    """A run with 0.2 s of other work between two steps, and evaluations and saves of 1 s each."""
    with contextlib.ExitStack() as stack:
        for owner, name, seconds in (
            (Tracker, "advance", 0.2),
            (Evaluator, "evaluate", 1.0),
            (Checkpointer, "save", 1.0),
        ):
            real = getattr(owner, name)

            def later(*args, real=real, seconds=seconds, **named):
                time.sleep(seconds)
                return real(*args, **named)

            stack.enter_context(unittest.mock.patch.object(owner, name, later))
        return run(world, *arguments)


def test_rates_count_the_time_between_steps_but_not_evaluations(ranks, run_inputs, tmp_path):
    """Steps of 10 rows; with evaluations they would be at most 10 rows/s."""
    more = ("train.steps=3", "evaluation.every=1", "checkpoint.every=2", "train.log_every=1")
    ranks(1, run_with_pauses, *options(run_inputs, tmp_path / "run", *more))
    rates = [row["samples_per_s"] for row in metric_rows(tmp_path / "run") if "loss" in row]
    assert len(rates) == 3
    assert max(rates) > 11
    ranks(1, run_with_pauses, *options(run_inputs, tmp_path / "joined", "train.steps=4", "train.log_every=4"))
    (rate,) = [row["samples_per_s"] for row in metric_rows(tmp_path / "joined") if "loss" in row]
    assert rate < 40 / 0.6


def collection_states(world: World, steps: int, *arguments: str) -> dict[str, list[bool]]:
    """Whether automatic garbage collection is enabled in steps, in evaluations, and after the run has failed."""
    enabled: dict[str, list[bool]] = {"step": [], "evaluation": [], "after": []}
    train_step, evaluate = loop.train_step, Evaluator.evaluate

    def recording_step(*args, **kwargs):
        enabled["step"].append(gc.isenabled())
        if len(enabled["step"]) == steps:
            raise ZeroDivisionError
        return train_step(*args, **kwargs)

    def recording_evaluation(*args, **kwargs):
        enabled["evaluation"].append(gc.isenabled())
        return evaluate(*args, **kwargs)

    loop.train_step, Evaluator.evaluate = recording_step, recording_evaluation
    try:
        with pytest.raises(ZeroDivisionError):
            run(world, *arguments)
    finally:
        loop.train_step, Evaluator.evaluate = train_step, evaluate
    enabled["after"].append(gc.isenabled())
    return enabled


def test_garbage_is_not_collected_within_steps(ranks, run_inputs, tmp_path):
    more = ("train.steps=4", "evaluation.every=1", "evaluation.at_start=true")
    for enabled in ranks(2, collection_states, 3, *options(run_inputs, tmp_path / "run", *more)):
        assert enabled == {"step": [False] * 3, "evaluation": [True] * 3, "after": [True]}


def prepared_in_time(world: World, steps: int, batches_per_step: int, *arguments: str) -> list[bool]:
    """For each step whether the batches of the next one are prepared while it runs."""
    prepared, in_time = [], []
    changed = threading.Condition()
    make, train_step = loop.RankBatches.__call__, loop.train_step

    def recording_make(self, number):
        batch = make(self, number)
        with changed:
            prepared.append(number)
            changed.notify_all()
        return batch

    def waiting_step(context, *batches, **kwargs):
        expected = batches_per_step * min(steps, context.state.step + 2)
        with changed:
            in_time.append(changed.wait_for(lambda: len(prepared) >= expected, timeout=10))
        return train_step(context, *batches, **kwargs)

    loop.RankBatches.__call__, loop.train_step = recording_make, waiting_step
    try:
        run(world, *arguments)
    finally:
        loop.RankBatches.__call__, loop.train_step = make, train_step
    return in_time


def test_the_batches_of_the_next_step_are_prepared_during_a_step(ranks, run_inputs, tmp_path):
    more = (
        "train.steps=3", "train.gradient_accumulation_steps=5", "train.global_batch_size=4", "evaluation.every=0",
    )  # fmt: skip
    assert ranks(1, prepared_in_time, 3, 5, *options(run_inputs, tmp_path / "run", *more)) == [[True] * 3]
