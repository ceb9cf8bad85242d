"""Whole runs on real ranks: the rates they tell, when they collect garbage, and batches that are there in time."""

import gc
import itertools
import time
from pathlib import Path

import pytest
import torch

from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.models.build import build_encoder
from embedtrain.models.source import open_model_source
from embedtrain.planning.flops import model_flops
from embedtrain.training import loop
from embedtrain.training.train import train
from tests.small import save_small, small_model, write_beir, write_rows
from tests.test_run import BASE, options, rows, run


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    write_rows(folder / "train.jsonl", 36)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta"), folder / "model")
    return folder


def flops_of_run(world: World, *arguments: str) -> tuple[list[float], list[list[int]], str]:
    """Of each step: operations that were reported, lengths of the texts of all ranks; and what was said."""
    reported, lengths = [], []
    real = loop.train_step

    def step(trainable, *batches, **how):
        own = []
        for chunk in (chunk for batch in batches for chunk in batch.chunks):
            own += chunk.mask.sum(dim=1).tolist() if chunk.packing is None else chunk.packing.lengths
        everyone = world.gather(own)
        lengths.append(sorted(itertools.chain(*everyone)))
        report = real(trainable, *batches, **how)
        reported.append(report.flops)
        return report

    loop.train_step = step
    try:
        told = run(world, *arguments)
    finally:
        loop.train_step = real
    return reported, lengths, told


def test_work_is_counted_on_real_tokens_whatever_the_ranks_and_chunks(ranks, workshop, tmp_path):
    flops = model_flops(build_encoder(open_model_source(small_model("xlm-roberta"))))
    found = {}
    for size, chunk_tokens in ((1, 1000), (2, 60)):  # all graphs kept in one chunk; many chunks encoded twice
        more = ("train.steps=4", f"train.chunk_tokens={chunk_tokens}", "train.activation_tokens=0")
        out = tmp_path / str(size)
        reported, lengths, told = ranks(size, flops_of_run, *options(workshop, out, *more))[0]
        assert reported == pytest.approx([flops.of(torch.tensor(one)) for one in lengths])
        assert "mfu is a share of" in told
        found[size] = reported
        steps = [row for row in rows(out) if "loss" in row]
        for row, work in zip(steps, reported, strict=True):
            total = row["model_tflops"] * 1e12 * size
            tokens = sum(lengths[row["step"] - 1])
            assert total / row["tokens_per_s"] == pytest.approx(work / tokens)
            assert 0 < row["mfu"] < 2
        rates = [row["model_tflops"] / row["mfu"] for row in steps]
        assert rates == pytest.approx([rates[0]] * 4)
        measured = [row["step"] for row in steps if "communication" in row]
        assert measured == ([] if size == 1 else [3])
    assert found[2] == pytest.approx(found[1])


def watched(world: World, steps: int, *arguments: str) -> dict[str, list[bool]]:
    """Whether Python collects by itself in steps, in evaluations, and after the run."""
    (recipe,) = compose_recipes([*BASE, *arguments])
    seen: dict[str, list[bool]] = {"step": [], "evaluation": [], "after": []}
    step, evaluate = loop.train_step, Evaluator.evaluate

    def watched_step(*args, **how):
        seen["step"].append(gc.isenabled())
        if len(seen["step"]) == steps:
            raise ZeroDivisionError
        return step(*args, **how)

    def watched_evaluation(*args, **kwargs):
        seen["evaluation"].append(gc.isenabled())
        return evaluate(*args, **kwargs)

    loop.train_step, Evaluator.evaluate = watched_step, watched_evaluation
    try:
        with pytest.raises(ZeroDivisionError):
            train(recipe, world)
    finally:
        loop.train_step, Evaluator.evaluate = step, evaluate
    seen["after"].append(gc.isenabled())
    return seen


def test_garbage_waits_for_the_end_of_a_step(ranks, workshop, tmp_path):
    more = ("train.steps=4", "evaluation.every=1", "evaluation.at_start=true")
    for seen in ranks(2, watched, 3, *options(workshop, tmp_path / "run", *more)):
        assert seen == {"step": [False] * 3, "evaluation": [True] * 3, "after": [True]}


def made_in_time(world: World, steps: int, each: int, *arguments: str) -> list[bool]:
    """Whether the batches of the next step are made while a step runs."""
    (recipe,) = compose_recipes([*BASE, *arguments])
    made, enough = [], []
    make, step = loop.TrainingLoop._batch, loop.train_step

    def counted(self, number):
        batch = make(self, number)
        made.append(number)
        return batch

    def patient(run, *batches, **how):
        wanted = each * min(steps, run.state.step + 2)
        deadline = time.monotonic() + 10
        while len(made) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        enough.append(len(made) >= wanted)
        return step(run, *batches, **how)

    loop.TrainingLoop._batch, loop.train_step = counted, patient
    try:
        train(recipe, world)
    finally:
        loop.TrainingLoop._batch, loop.train_step = make, step
    return enough


def test_the_next_steps_batches_are_made_while_a_step_runs(ranks, workshop, tmp_path):
    more = ("train.steps=3", "train.gradient_accumulation_steps=5", "train.global_batch_size=4", "evaluation.every=0")
    arguments = options(workshop, Path(tmp_path) / "run", *more)
    assert ranks(1, made_in_time, 3, 5, *arguments) == [[True] * 3]
