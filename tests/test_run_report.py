"""Whole runs with their reports: the same sample on any number of ranks, and training that is bit-identical."""

import contextlib
import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import World
from embedtrain.errors import Stopped
from embedtrain.report.sample import (
    AFTER,
    BEFORE,
    PairRelation,
    Role,
    Sample,
    Vectors,
    read_texts,
    read_vectors,
)
from embedtrain.tracking.metrics import query_metrics_path, read_query_metrics
from embedtrain.tracking.sessions import read_sessions
from embedtrain.training.train import train
from tests.runs import BASE as OPTIONS
from tests.runs import losses, metric_rows, options
from tests.small import save_small, small_model, write_beir, write_rows

BASE = [option for option in OPTIONS if option != "tracking.report=false"]


class StopAt(StopSignals):
    """A signal during a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.remaining = step

    @property
    def notice(self) -> Any:
        self.remaining -= 1
        if self.remaining == 0:
            self.received = signal.SIGTERM
        return super().notice


def run(world: World, stop_at: int | None, *arguments: str) -> str:
    """Train as the command does; the output of this rank."""
    (recipe,) = compose_recipes([*BASE, *arguments])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(Stopped):
        train(recipe, world, None if stop_at is None else StopAt(stop_at))
    return output.getvalue()


def read_sample(directory: Path) -> tuple[Sample, Vectors, Vectors]:
    folder = directory / "sample"
    sample = read_texts(folder)
    assert sample is not None
    before, after = (read_vectors(folder, which, sample) for which in (BEFORE, AFTER))
    assert before is not None
    assert after is not None
    return sample, before, after


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    write_rows(folder / "train.jsonl", 36)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta"), folder / "model")
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "dropout")
    return folder


PROMPTS = ("model.query_prompt='alpha beta: '", "model.document_prompt='nu: '")


def test_vectors_equal_those_of_the_models(ranks, workshop, tmp_path):
    """Vectors of the initial and of the exported model, without dropout, on two ranks and on three."""
    samples = {}
    for size in (2, 3):
        more = ("train.steps=4", "evaluation.at_start=true", *PROMPTS)
        out = options(workshop, tmp_path / str(size), *more, model="dropout")
        output, *others = ranks(size, run, None, *out)
        samples[size] = read_sample(tmp_path / str(size))
        assert output.endswith(f"report: {tmp_path / str(size) / 'report.html'}\n")
        assert set(others) == {""}
        assert read_sessions(tmp_path / str(size) / "sessions.jsonl")[0].steps_per_epoch == 4  # 36 rows, batches of 10
        # The metrics of single queries have the means that were logged.
        rows = [row for row in metric_rows(tmp_path / str(size)) if "set" in row]
        assert [row["step"] for row in rows] == [0, 4]
        for row in rows:
            measured = read_query_metrics(query_metrics_path(tmp_path / str(size), row["step"], "dev"))
            assert measured is not None
            assert measured.queries == [f"q{number}" for number in range(20)]
            means = dict(zip(measured.metrics, measured.values.mean(axis=0), strict=True))
            assert {name: row[name] for name in means} == pytest.approx(means, abs=1e-12)
        assert 'class="said"' in (tmp_path / str(size) / "report.html").read_text()  # about the interval of the change
    assert samples[2][0] == samples[3][0]
    assert samples[2][1].values == pytest.approx(samples[3][1].values, abs=1e-5)
    sample, before, after = samples[2]
    assert (before.step, after.step) == (0, 4)
    held_out = [text for text in sample.texts if text.held_out]
    assert {text.origin for text in sample.texts if not text.held_out} == {"train"}
    assert {text.role for text in held_out} == {Role.query, Role.document}
    assert {pair.relation for pair in sample.pairs} == {PairRelation.positive, PairRelation.negative}
    prompts = {"query": "alpha beta: ", "document": "nu: "}
    for directory, vectors in ((workshop / "dropout", before), (tmp_path / "2" / "model", after)):
        model = SentenceTransformer(str(directory), device="cpu")
        expected = model.encode(
            [prompts[text.role.value] + text.text for text in sample.texts], normalize_embeddings=True
        )
        assert vectors.values == pytest.approx(expected, abs=2e-5)
    page = (tmp_path / "3" / "report.html").read_text()
    assert "Nearest neighbours" in page
    assert "After step 4" in page


@pytest.mark.parametrize(
    "more",
    [
        ("model.attention=packed", "evaluation.at_start=true"),
        pytest.param(("model.attention=padded",), marks=pytest.mark.slow),
    ],
)
def test_training_is_bit_identical_without_a_report(ranks, workshop, tmp_path, more):
    """With dropout."""
    with_report, without = tmp_path / "true", tmp_path / "false"
    for out in (with_report, without):
        common = ("train.steps=3", f"tracking.report={out.name}", *more)
        ranks(2, run, None, *options(workshop, out, *common, model="dropout"))
    assert losses(with_report) == losses(without)
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (with_report, without)]
    assert weights[0] == weights[1]
    assert (with_report / "report.html").is_file()
    assert not (without / "report.html").exists()
    assert not (without / "sample").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_on_other_ranks(ranks, workshop, tmp_path):
    """Stopped on two ranks, resumed on three with another name of the set: the sample is the initial one."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    common = ("train.steps=6", "checkpoint.every=2")
    ranks(2, run, 3, *options(workshop, out, *common))
    page = (out / "report.html").read_text()
    assert "stopped by a signal" in page
    assert "Before training" in page
    assert "After step" not in page
    before = (out / "sample" / "before.safetensors").read_bytes()
    other = "evaluation.sets=[{path: " + str(workshop / "dev") + ", name: renamed}]"
    ranks(3, run, None, *options(workshop, out, *common), other)
    ranks(2, run, None, *options(workshop, whole, *common))
    assert (out / "sample" / "before.safetensors").read_bytes() == before
    for vectors, expected in zip(read_sample(out)[1:], read_sample(whole)[1:], strict=True):
        assert vectors.values == pytest.approx(expected.values, abs=1e-4)
    sessions = read_sessions(out / "sessions.jsonl")
    assert [
        (session.ranks, session.step, session.end.last_step, session.end.how, session.end.exported)
        for session in sessions
    ] == [
        (2, 0, 3, "stopped", None),
        (3, 3, 6, "finished", 6),
    ]
    page = (out / "report.html").read_text()
    assert "2, then 3 (cpu)" in page
    assert "After step 6" in page
    (output, *_) = ranks(3, run, None, *options(workshop, out, *common), other)
    assert "train.steps" in output
    assert read_sessions(out / "sessions.jsonl")[-1].end.exported == 6
    assert (out / "sample" / "before.safetensors").read_bytes() == before


def test_the_vectors_after_training_are_those_of_the_exported_step(ranks, workshop, tmp_path):
    """No later evaluation is better than the first, so step 2 is exported."""
    more = ("train.steps=4", "evaluation.every=2", "checkpoint.best_metric=dev/recall@100", "checkpoint.keep=1")
    ranks(2, run, None, *options(workshop, tmp_path / "run", *more), "export.check=true")
    sample, _, after = read_sample(tmp_path / "run")
    assert after.step == 2
    model = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    assert after.values == pytest.approx(model.encode([text.text for text in sample.texts]), abs=2e-5)
    assert re.search(
        r"weights of step 2 \(float32; compared with the encoder: largest difference \S+, allowed \S+\)",
        (tmp_path / "run" / "report.html").read_text(),
    )


@pytest.mark.slow  # test_vectors_equal_those_of_the_models
def test_adapters_under_ddp(ranks, workshop, tmp_path):
    more = ("train.steps=3", "model.lora.rank=4", "parallel.strategy=ddp", "optim.lr=1e-2")
    ranks(2, run, None, *options(workshop, tmp_path / "run", *more))
    sample, before, after = read_sample(tmp_path / "run")
    for directory, vectors in ((workshop / "model", before), (tmp_path / "run" / "model", after)):
        model = SentenceTransformer(str(directory), device="cpu")
        expected = model.encode([text.text for text in sample.texts], normalize_embeddings=True)
        assert vectors.values == pytest.approx(expected, abs=2e-5)
    assert np.abs(before.values - after.values).max() > 1e-3


def test_a_report_that_cannot_be_written_costs_one_warning(ranks, workshop, tmp_path):
    common = ("train.steps=2", "evaluation.sets=[]")
    out = tmp_path / "run"
    (out / "report.html").mkdir(parents=True)
    (out / "run.lock").touch()  # of an earlier run
    output, other = ranks(2, run, None, *options(workshop, out), *common)
    assert len(re.findall(r"^warning: .*report\.html", output, re.MULTILINE)) == 1
    assert other == ""
    assert (out / "model" / "model.safetensors").is_file()
    assert list(losses(out)) == [1, 2]


def test_a_run_that_fails(ranks, workshop, tmp_path):
    from embedtrain.report.page import write_report

    out = tmp_path / "run"
    with pytest.raises(AssertionError, match=r"TrainingError"):
        ranks(2, run, None, *options(workshop, out, "train.steps=3", "optim.lr=1e30", "optim.warmup=0"))
    (session,) = read_sessions(out / "sessions.jsonl")
    assert session.end.how == "failed"
    write_report([out], out / "report.html")
    page = (out / "report.html").read_text()
    assert "TrainingError: " in page
    assert "Before training" in page


def test_scored_and_labelled_pairs(ranks, workshop, tmp_path):
    lines = [{"a": f"alpha {n}", "b": f"beta {n}", "score": n / 30} for n in range(31)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "sts.tsv").write_text(
        "sentence1\tsentence2\tscore\n" + "".join(f"alpha {n}\tgamma {n}\t{n}\n" for n in range(12))
    )
    (tmp_path / "labelled.tsv").write_text(
        "sentence1\tsentence2\tlabel\n" + "".join(f"mu {n}\tnu {n}\t{n % 2}\n" for n in range(12))
    )
    arguments = [
        f"model.path={workshop / 'model'}", "loss=cosent", "train.steps=1", f"output_dir={tmp_path / 'run'}",
        f"data.train=[{tmp_path / 'pairs.jsonl'}]",
        f"evaluation.sets=[{tmp_path / 'sts.tsv'},{tmp_path / 'labelled.tsv'}]",
    ]  # fmt: skip
    ranks(1, run, None, *arguments)
    sample, *_ = read_sample(tmp_path / "run")
    by_origin: dict[str, set[PairRelation]] = {}
    for pair in sample.pairs:
        by_origin.setdefault(sample.texts[pair.first].origin, set()).add(pair.relation)
    assert by_origin == {
        "sts": {PairRelation.low, PairRelation.middle, PairRelation.high},
        "labelled": {PairRelation.same, PairRelation.different},
        "pairs": {PairRelation.low, PairRelation.middle, PairRelation.high},
    }
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Held out: scored pairs" in page
    assert "Held out: labelled pairs and classes" in page
    assert "Nearest neighbours" not in page
    assert np.isfinite(read_sample(tmp_path / "run")[1].values).all()
