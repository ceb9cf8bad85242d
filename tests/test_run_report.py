"""Whole runs with their reports: the same sample on any number of ranks, no bit of training changed, nothing lost."""

import contextlib
import io
import json
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
from embedtrain.tracking.report.sample import (
    AFTER,
    BEFORE,
    PairRelation,
    Role,
    Sample,
    Vectors,
    read_texts,
    read_vectors,
)
from embedtrain.tracking.sessions import read_sessions
from embedtrain.training.train import train
from tests.runs import BASE, losses, options
from tests.small import save_small, small_model, write_beir, write_rows


class StopAt(StopSignals):
    """A signal that comes while the step is under way."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    @property
    def notice(self) -> Any:
        self.left -= 1
        if self.left == 0:
            self.asked = signal.SIGTERM
        return super().notice


def run(world: World, stop_at: int | None, *arguments: str) -> str:
    """Train as the door would; what this rank said."""
    (recipe,) = compose_recipes([*BASE, *arguments])
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(Stopped):
        train(recipe, world, None if stop_at is None else StopAt(stop_at))
    return told.getvalue()


def sample_of(directory: Path) -> tuple[Sample, Vectors, Vectors]:
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


def test_the_sample_is_what_the_models_say(ranks, workshop, tmp_path):
    """Vectors are those of the first and of the exported model, on two ranks and on three, and without dropout."""
    found = {}
    for size in (2, 3):
        out = options(workshop, tmp_path / str(size), "train.steps=4", *PROMPTS, model="dropout")
        told, *silent = ranks(size, run, None, *out)
        found[size] = sample_of(tmp_path / str(size))
        assert told.endswith(f"report: {tmp_path / str(size) / 'report.html'}\n")
        assert set(silent) == {""}
    assert found[2][0] == found[3][0]
    assert found[2][1].values == pytest.approx(found[3][1].values, abs=1e-5)
    sample, before, after = found[2]
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


def test_it_changes_no_bit_of_the_training(ranks, workshop, tmp_path):
    """Dropout on; evaluated at the start or not, packed or padded."""
    for number, more in enumerate(
        (("model.attention=padded",), ("model.attention=packed", "evaluation.at_start=true"))
    ):
        for report in ("true", "false"):
            out = tmp_path / f"{number}-{report}"
            common = ("train.steps=3", f"tracking.report={report}", *more)
            ranks(2, run, None, *options(workshop, out, *common, model="dropout"))
        with_report, without = tmp_path / f"{number}-true", tmp_path / f"{number}-false"
        assert losses(with_report) == losses(without)
        weights = [(one / "model" / "model.safetensors").read_bytes() for one in (with_report, without)]
        assert weights[0] == weights[1]
        assert (with_report / "report.html").is_file()
        assert not (without / "report.html").exists()
        assert not (without / "sample").exists()


def test_a_run_that_is_stopped_and_goes_on_elsewhere(ranks, workshop, tmp_path):
    """Stopped on two ranks, gone on with three, its set called otherwise: the sample is that of the beginning."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    common = ("train.steps=6", "checkpoint.every=2")
    ranks(2, run, 3, *options(workshop, out, *common))
    page = (out / "report.html").read_text()
    assert "stopped by a signal" in page
    assert "Before training" in page
    assert "After step" not in page
    before = (out / "sample" / "before.safetensors").read_bytes()
    other = "evaluation.sets=[{path: " + str(workshop / "dev") + ", name: otherwise}]"
    ranks(3, run, None, *options(workshop, out, *common), other)
    ranks(2, run, None, *options(workshop, whole, *common))
    assert (out / "sample" / "before.safetensors").read_bytes() == before
    for one, expected in zip(sample_of(out)[1:], sample_of(whole)[1:], strict=True):
        assert one.values == pytest.approx(expected.values, abs=1e-4)
    sessions = read_sessions(out / "sessions.jsonl")
    assert [(one.ranks, one.step, one.last_step, one.how, one.exported) for one in sessions] == [
        (2, 0, 3, "stopped", None),
        (3, 3, 6, "finished", 6),
    ]
    page = (out / "report.html").read_text()
    assert "2, then 3 (cpu)" in page
    assert "After step 6" in page
    (told, *_) = ranks(3, run, None, *options(workshop, out, *common), other)
    assert "is the end of this run" in told
    assert read_sessions(out / "sessions.jsonl")[-1].exported == 6
    assert (out / "sample" / "before.safetensors").read_bytes() == before


def test_after_is_the_step_that_was_exported(ranks, workshop, tmp_path):
    """No later evaluation is better than the first: what is exported, and looked at, is step 2."""
    more = ("train.steps=4", "evaluation.every=2", "checkpoint.best_metric=dev/recall@100", "checkpoint.keep=1")
    ranks(2, run, None, *options(workshop, tmp_path / "run", *more))
    sample, _, after = sample_of(tmp_path / "run")
    assert after.step == 2
    model = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    assert after.values == pytest.approx(model.encode([text.text for text in sample.texts]), abs=2e-5)
    assert "weights of step 2" in (tmp_path / "run" / "report.html").read_text()


def test_adapters_under_ddp(ranks, workshop, tmp_path):
    more = ("train.steps=3", "model.lora.rank=4", "parallel.strategy=ddp", "optim.lr=1e-2")
    ranks(2, run, None, *options(workshop, tmp_path / "run", *more))
    sample, before, after = sample_of(tmp_path / "run")
    for directory, vectors in ((workshop / "model", before), (tmp_path / "run" / "model", after)):
        model = SentenceTransformer(str(directory), device="cpu")
        expected = model.encode([text.text for text in sample.texts], normalize_embeddings=True)
        assert vectors.values == pytest.approx(expected, abs=2e-5)
    assert np.abs(before.values - after.values).max() > 1e-3


def test_what_cannot_be_written_costs_a_line_and_not_the_run(ranks, workshop, tmp_path):
    common = ("train.steps=2", "evaluation.sets=[]")
    out = tmp_path / "run"
    (out / "report.html").mkdir(parents=True)
    (out / "sample").write_text("a file where the folder should be")
    (out / "sessions.jsonl").mkdir()
    told, silent = ranks(2, run, None, *options(workshop, out), *common)
    assert told.count("could not be made, and the run goes on") == 1
    assert silent == ""
    assert (out / "model" / "model.safetensors").is_file()
    assert list(losses(out)) == [1, 2]


def test_a_run_that_fails_says_so(ranks, workshop, tmp_path):
    from embedtrain.tracking.report.page import write_report

    out = tmp_path / "run"
    with pytest.raises(AssertionError, match="TrainingError"):
        ranks(2, run, None, *options(workshop, out, "train.steps=3", "optim.lr=1e30", "optim.warmup=0"))
    (session,) = read_sessions(out / "sessions.jsonl")
    assert session.how == "failed"
    write_report([out], out / "report.html")
    page = (out / "report.html").read_text()
    assert "TrainingError: " in page
    assert "Before training" in page


def test_rows_with_scores_or_classes_and_sets_of_all_kinds(ranks, workshop, tmp_path):
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
    sample, *_ = sample_of(tmp_path / "run")
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
    assert np.isfinite(sample_of(tmp_path / "run")[1].values).all()
