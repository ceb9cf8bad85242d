"""Losses and metrics of the user: the example of the documentation, its check, and who may name code."""

import sys
from pathlib import Path

import pytest
import torch

from embedtrain import evaluate, testing, train
from embedtrain.config.compose import compose_recipe
from embedtrain.config.losses import CustomConfig
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import Score
from embedtrain.losses.types import Loss, LossOutput
from embedtrain.testing import RandomBatch, check_loss, compare, distributions, measure
from tests.conftest import ROOT
from tests.docs.pages import blocks
from tests.small import write_rows
from tests.test_api import DEV, OPTIONS, rows

PAGE = ROOT / "docs" / "custom-losses.md"


class LocalMean(Loss):
    """Wrong: a mean over the rows of a rank, and negatives of this rank only."""

    def forward(self, queries, documents, batch_info):
        scores = queries @ documents.T
        return LossOutput(torch.nn.functional.cross_entropy(scores, batch_info.positives))


class NoGraph(Loss):
    """Wrong: a rank without rows returns a constant."""

    def forward(self, queries, documents, batch_info):
        if not len(queries):
            return LossOutput(torch.zeros((), dtype=queries.dtype))
        return LossOutput((queries.sum() + documents.sum()) / sum(batch_info.rows.num_rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of the page."""
    path = tmp_path_factory.mktemp("custom")
    for block in blocks(PAGE):
        if block.title:
            (path / block.title).write_text(block.text)
    return path


def measure_in(world: World, folder: Path, *arguments: object) -> list[object]:
    sys.path.insert(0, str(folder))
    try:
        *common, cases = arguments
        return [measure(*common, case[world.rank]) for case in cases]
    finally:
        sys.path.remove(str(folder))


def check_in_pool(ranks, folder: Path, path: str, kwargs: dict, batch: RandomBatch, size: int) -> None:
    """`check_loss` without starting processes."""
    ((reference,),) = ranks(1, measure_in, folder, path, kwargs, batch, [[list(range(batch.rows))]])
    cases = distributions(batch.rows, size)
    results = ranks(size, measure_in, folder, path, kwargs, batch, cases)
    for number, case in enumerate(cases):
        compare(reference, [result[number] for result in results], case, path, 1e-9)


def test_example_has_the_gradient_of_one_process(ranks, folder):
    check_in_pool(ranks, folder, "my_losses:MarginSoftmax", {"margin": 0.2}, RandomBatch(scores=True), 3)


def test_check_detects_losses_that_are_not_exact(ranks, folder):
    with pytest.raises(AssertionError, match=r"LocalMean on 2 ranks.* differs"):
        check_in_pool(ranks, folder, "tests.losses.test_custom:LocalMean", {}, RandomBatch(), 2)
    with pytest.raises(AssertionError, match=r"NoGraph: local_loss .* 0 rows"):
        check_in_pool(ranks, folder, "tests.losses.test_custom:NoGraph", {}, RandomBatch(), 2)
    with pytest.raises(ValueError, match="__main__:MyLoss"):
        check_loss("__main__:MyLoss")


# What ranks do instead of computing a loss, and how long.
FAILS = "import sys, time; rank = int(sys.argv[2]); time.sleep(99 * (1 - rank)); sys.exit(f'of rank {rank}')"
WAITS = "import time; time.sleep(99)"


@pytest.mark.parametrize(
    ("code", "seconds", "error"),
    [
        (FAILS, 60.0, r"^my:Loss failed on rank 1:\nof rank 1\n$"),
        (WAITS, 0.5, r"^my:Loss does not end on rank 0 .*collectives"),
    ],
)
def test_check_names_the_rank_that_fails_or_does_not_end(monkeypatch, code, seconds, error):
    """The first one that fails, although others wait for it."""
    monkeypatch.setattr(testing, "_SERVE", code)
    monkeypatch.setattr(testing, "_START_SECONDS", seconds)
    with pytest.raises(AssertionError, match=error):
        check_loss("my:Loss", world_sizes=[2])


@pytest.mark.slow
def test_check_starts_processes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check_loss("my_losses:MarginSoftmax", {"margin": 0.2}, batch=RandomBatch(rows=12, negatives=4))
    with pytest.raises(AssertionError, match="NoGraph"):
        check_loss(NoGraph, world_sizes=[2])


def test_training_with_a_class_or_its_path(run_inputs, folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    from my_losses import MarginSoftmax
    from my_metrics import support

    arguments = {"model": run_inputs / "model", "data": rows(), "quiet": True, "options": OPTIONS}
    one = train(
        **arguments, loss={"path": MarginSoftmax, "kwargs": {"margin": 0.2}}, output_dir=tmp_path / "class",
        evaluation={"sets": DEV, "function": support, "every": 2}, checkpoint={"best_metric": "support/accuracy"},
    )  # fmt: skip
    other = train(**arguments, loss="custom", output_dir=tmp_path / "path", **{
        "loss.path": "my_losses:MarginSoftmax", "loss.kwargs": {"margin": 0.2}
    })  # fmt: skip
    losses = [[row["loss"] for row in run.history if "loss" in row] for run in (one, other)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    evaluated = [row for row in one.history if row.get("set") == "support"]
    assert [row["step"] for row in evaluated] == [0, 2, 4] and 0 <= evaluated[0]["accuracy"] <= 1
    assert one.metrics["support"].keys() == {"accuracy"}
    measured = evaluate(one, function=support, quiet=True, output_dir=tmp_path / "evaluated")
    assert measured == {"support": pytest.approx({"accuracy": evaluated[-1]["accuracy"]})}
    with pytest.raises(ConfigError, match="function=support: "):
        evaluate(one, DEV | {"name": "support"}, function=support, quiet=True, output_dir=tmp_path / "evaluated")
    with pytest.raises(ConfigError, match=r"best_metric=support/precision: .*accuracy"):
        train(
            **arguments, output_dir=tmp_path / "best", evaluation={"function": support},
            checkpoint={"best_metric": "support/precision"},
        )  # fmt: skip


def test_classes_of_a_program_need_no_module(run_inputs, tmp_path):
    class ScaledCosine(Loss):
        def __init__(self, scale, dimension):
            super().__init__()
            assert dimension == 32
            self.scale = torch.nn.Parameter(torch.tensor(scale))

        def forward(self, queries, documents, batch_info):
            cosines = (queries * documents[batch_info.positives]).sum(dim=1)
            return LossOutput(-self.scale * cosines.sum() / sum(batch_info.rows.num_rows))

    def no_numbers(_encoder):
        return {"a": "b"}

    arguments = {"model": run_inputs / "model", "data": rows(), "quiet": True, "options": OPTIONS}
    trained = train(**arguments, loss={"path": ScaledCosine, "kwargs": {"scale": 2.0}}, output_dir=tmp_path / "run")
    assert trained.history[0]["loss"] < 0
    with pytest.raises(ConfigError, match=r"loss\.kwargs=\{\}: .*ScaledCosine.*scale"):
        train(**arguments, loss=ScaledCosine, output_dir=tmp_path / "kwargs")
    with pytest.raises(ConfigError, match=r"the evaluation function no_numbers"):
        train(**arguments, evaluation={"function": no_numbers}, output_dir=tmp_path / "function")


RECIPE = """# @package _global_
defaults:
  - override /loss: custom
name: theirs
loss: {path: "tests.losses.test_custom:LocalMean"}
evaluation: {function: "os:getcwd"}
"""


def test_a_file_cannot_name_code(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "theirs.yaml").write_text(RECIPE)
    (tmp_path / "recipe" / "part.yaml").write_text(
        RECIPE.replace("loss: custom", "loss: combined")
        .replace("loss: {path: ", "loss: {losses: [{name: infonce}, {name: custom, path: ")
        .replace('LocalMean"}', 'LocalMean"}]}')
    )
    write_rows(tmp_path / "rows.jsonl", 4)
    common = ["--config-dir", str(tmp_path), f"data.train=[{tmp_path / 'rows.jsonl'}]"]
    path, function = "tests.losses.test_custom:LocalMean", "evaluation.function=os:getcwd"
    for recipe, option in (("theirs", "loss.path"), ("part", r"loss\.losses\[1\]\.path")):
        with pytest.raises(ConfigError, match=f"{option}={path}: a file cannot name code"):
            compose_recipe([*common, f"recipe={recipe}", function])
    with pytest.raises(ConfigError, match=r"evaluation\.function=os:getcwd: a file cannot name code"):
        compose_recipe([*common, "recipe=theirs", f"loss.path={path}"])
    with pytest.raises(ConfigError, match="a file cannot name code"):  # not by a value of another option
        compose_recipe([*common, "recipe=theirs", function, f"name='{path}'"])
    recipe = compose_recipe([*common, "recipe=theirs", f"loss.path={path}", function])
    assert isinstance(recipe.loss, CustomConfig) and recipe.loss.path == path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_loses:X", "loss.path=my_loses:X: No module named 'my_loses'"),
        ("os:Nothing", "loss.path=os:Nothing: module 'os' has no attribute 'Nothing'"),
        ("os:getcwd", "loss.path=os:getcwd: must be a subclass of embedtrain.losses.types.Loss"),
        ("my_losses", "loss.path=my_losses: must be module:name, such as"),
    ],
    ids=["module", "attribute", "function", "form"],
)
def test_errors_name_the_path(run_inputs, tmp_path, path, message):
    with pytest.raises(ConfigError, match=message):
        train(
            model=run_inputs / "model", data=rows(), output_dir=tmp_path, quiet=True, options=OPTIONS,
            loss={"name": "custom", "path": path},
        )  # fmt: skip


class TrainedOnly(Score):
    """Compares texts in training, and has no methods of search."""

    def prepare(self, encoded):
        return encoded

    def compare(self, queries, documents, owners, counts):
        return (queries.values[owners] * documents.values).sum(1)


def test_a_score_without_search_says_so():
    score, part = TrainedOnly(), Part(torch.zeros(1, 4))
    for call in (lambda: score.search_rows(part.values), lambda: score.exact(part, part)):
        with pytest.raises(ModelError, match=r"TrainedOnly compares texts in training only.*search_rows"):
            call()
