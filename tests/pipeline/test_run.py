"""A pipeline runs from its first stage to its last, and resumes where it was killed, on any number of ranks."""

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import load_file

from embedtrain.config.commands import WRITING
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, ConfigError, FailedElsewhere
from embedtrain.formats.export_record import verify_settings
from embedtrain.pipeline.disk import disk_of_training
from embedtrain.pipeline.run import run_pipeline, without_timeout
from embedtrain.planning.model_costs import build_meta_encoder
from tests.faults.hooks import SignalWhen
from tests.faults.runs import start
from tests.pipeline.recipes import compose, pipeline_of_all_kinds, small_pipeline


@dataclass(frozen=True)
class SignalAfterBlocks:
    """Send a rank a signal after it has written so many blocks of mined rows."""

    rank: int
    blocks: int
    which: signal.Signals = signal.SIGKILL

    def __call__(self, rank: int) -> None:
        from embedtrain.mining.folder import MiningFolder

        real, written = MiningFolder.write_block, []

        def write_block(folder, *arguments):
            real(folder, *arguments)
            written.append(arguments)
            if rank == self.rank and len(written) == self.blocks:
                os.kill(os.getpid(), self.which)
                time.sleep(60)

        MiningFolder.write_block = write_block


def run_small(world: World, folder, content, *arguments):
    run_pipeline(compose(folder / f"rank-{world.rank}", content, f"output_dir={folder / 'run'}", *arguments))


def record(folder, stage):
    return json.loads((folder / "run" / "stages" / stage / "stage.json").read_text())


def weights(folder, stage="final"):
    return load_file(folder / "run" / "stages" / stage / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(ranks, run_inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ranks(2, run_small, folder, small_pipeline(run_inputs))
    return folder


def require_equal_weights(folder, other):
    """Equal to rounding, which depends on the number of ranks. The gradient of biases of keys is 0 but for rounding."""
    resumed, expected = weights(folder), weights(other)
    differences = {
        name: float(np.abs(resumed[name] - tensor).max())
        for name, tensor in expected.items()
        if not name.endswith("key.bias")
    }
    assert max(differences.values()) < 1e-4, differences


def killed_run(folder, content, size, hook):
    pipeline = compose(folder, content)
    run = start(folder, "run", size=size, hook=hook, pipeline=pipeline)
    codes = run.wait(launcher=True)
    assert -signal.SIGKILL in codes, run.text
    return run


def finished_run(folder, content, size):
    run = start(folder, "run", size=size, pipeline=compose(folder, content))
    assert run.wait(300) == [0] * size, run.text
    return run


def test_what_a_pipeline_leaves_behind(undisturbed, run_inputs):
    root = undisturbed / "run"
    assert {"pipeline.yaml", "lineage.json", "report.html", "run.lock"} <= {path.name for path in root.iterdir()}
    lineage = json.loads((root / "lineage.json").read_text())["stages"]
    names = ["weak", "weak-evaluation", "mined", "tuned", "tuned-evaluation", "final"]
    assert [stage["stage"] for stage in lineage] == names
    by_name = dict(zip(names, lineage, strict=True))
    assert by_name["tuned"]["inputs"]["model.path"] == by_name["weak"]["outputs"]["model"]
    assert by_name["tuned"]["inputs"]["data.train[0].path"] == by_name["mined"]["outputs"]["*.jsonl"]
    assert by_name["tuned"]["ranks"] == 2
    measured = by_name["tuned-evaluation"]["metrics"]["dev"]["ndcg@10"]
    rows = (root / "stages" / "tuned-evaluation" / "metrics.jsonl").read_text().splitlines()
    assert measured == json.loads(rows[-1])["ndcg@10"]
    page = (root / "report.html").read_text()
    assert page.index("Stages</h2>") < page.index("tuned-evaluation</th>") < page.index(f"<td>{measured:.4f}</td>")
    exported = root / "stages" / "tuned" / "model"
    history = json.loads((exported / "lineage.json").read_text())["stages"]
    assert [stage["stage"] for stage in history] == ["weak", "weak-evaluation", "mined", "tuned"]
    card = (exported / "README.md").read_text()
    assert card.index("| weak | train |") < card.index("| mined | mine |") < card.index("| tuned | train |")
    verify_settings(exported)
    assert weights(undisturbed).keys() == load_file(run_inputs / "model" / "model.safetensors").keys()


def test_the_estimate_of_disk_space_is_what_a_training_writes(undisturbed, run_inputs, tmp_path):
    recipe = compose(tmp_path, small_pipeline(run_inputs)).stage("weak").options
    weak = undisturbed / "run" / "stages" / "weak"
    files = [path for folder in ("checkpoints", "model") for path in (weak / folder).rglob("*.safetensors")]
    headers = [8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    written = sum(path.stat().st_size for path in files) - sum(headers)
    assert disk_of_training(recipe, build_meta_encoder(recipe)) == pytest.approx(written, rel=0.01)


def test_what_the_last_stage_needs_is_required_before_the_first_one(ranks, run_inputs, tmp_path):
    with pytest.raises(AssertionError) as error:
        ranks(1, run_small, tmp_path, small_pipeline(run_inputs), "stages.final.push_to_hub=me/model")
    for part in (ConfigError.__name__, "stages.final", "push_to_hub=me/model"):
        assert part in str(error.value)
    assert not (tmp_path / "run" / "stages").exists()


@pytest.mark.slow
def test_killed_in_three_stages_and_resumed_on_other_numbers_of_ranks(undisturbed, run_inputs, tmp_path):
    content = small_pipeline(run_inputs)
    killed_run(tmp_path, content, 2, SignalWhen(1, "training", 5))  # of weak, after the checkpoint of step 4
    assert not (tmp_path / "run" / "stages" / "mined").exists()
    text = killed_run(tmp_path, content, 1, SignalAfterBlocks(0, 2)).text
    assert "resuming from" in text
    assert record(tmp_path, "weak")["ended"] is not None
    assert record(tmp_path, "mined")["ended"] is None
    text = finished_run(tmp_path, content, 3).text
    assert "weak: has ended before" in text
    assert "mined (mine), resumed" in text
    require_equal_weights(tmp_path, undisturbed)


@pytest.mark.slow  # one kill in three of the stages: above
def test_random_kills_in_every_stage(undisturbed, run_inputs, tmp_path):
    generator, content, kills = random.Random(5), small_pipeline(run_inputs), 0
    while kills < 10:
        size = generator.choice([1, 2, 3])
        run = start(tmp_path, "run", size=size, pipeline=compose(tmp_path, content))
        time.sleep(generator.uniform(1, 6))
        if all(process.is_alive() for process in run.processes):
            run.send(signal.SIGKILL, generator.randrange(size))
            kills += 1
        codes = run.wait(launcher=True)
        if codes == [0] * size:
            break
    finished_run(tmp_path, content, 2)
    assert kills > 2
    require_equal_weights(tmp_path, undisturbed)


@pytest.fixture(scope="module")
def undisturbed_kinds(run_inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    finished_run(folder, pipeline_of_all_kinds(run_inputs), 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 3, 1), (2,)])
def test_killed_in_every_kind_of_stage(undisturbed_kinds, run_inputs, tmp_path, sizes):
    """Each stage is killed at a random part of the time that it takes, and resumed by the next number of ranks."""
    content, generator, killed = pipeline_of_all_kinds(run_inputs), random.Random(7), []
    # `pages` starts processes, which ranks of tests may not: tests/pages kills it, and runs it as a stage.
    assert {stage["do"] for stage in content["stages"].values()} == set(WRITING) - {"pages"}
    names = [stage.name for stage in compose(tmp_path, content).stages]
    for number, name in enumerate(names):
        size, undisturbed = sizes[number % len(sizes)], record(undisturbed_kinds, name)
        path = tmp_path / "run" / "stages" / name / "stage.json"
        if path.exists() and record(tmp_path, name)["ended"] is not None:
            continue  # a faster run than the undisturbed one was killed in a later stage
        run = start(tmp_path, "run", size=size, pipeline=compose(tmp_path, content))
        run.until(lambda run, name=name: re.search(rf"^stage \S+ {name} \(", run.text, re.MULTILINE), 300)
        time.sleep(generator.uniform(0, undisturbed["ended"] - undisturbed["began"]))
        run.processes[generator.randrange(size)].kill()
        run.wait(300, launcher=True)
        killed += [name] if not path.exists() or record(tmp_path, name)["ended"] is None else []
    assert len(killed) > len(names) / 2, killed
    finished_run(tmp_path, content, sizes[0])
    require_equal_weights(tmp_path, undisturbed_kinds)
    if len(sizes) == 1:
        resumed, expected = weights(tmp_path), weights(undisturbed_kinds)
        assert all(np.array_equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_signal_stops_the_pipeline_and_the_same_command_resumes(run_inputs, tmp_path):
    content = small_pipeline(run_inputs, evaluation={})
    del content["stages"]["tuned"], content["stages"]["final"]
    run = start(
        tmp_path, "run", size=2, hook=SignalWhen(0, "training", 3, which=signal.SIGTERM),
        pipeline=compose(tmp_path, content),
    )  # fmt: skip
    assert run.wait() == [75, 75], run.text
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert (stopped["stage"], stopped["signal"]) == ("weak", "SIGTERM")
    run = start(
        tmp_path, "run", size=2, hook=SignalAfterBlocks(0, 2, signal.SIGTERM),
        pipeline=compose(tmp_path, content),
    )  # fmt: skip
    assert 75 in run.wait(launcher=True), run.text
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["stage"] == "mined"
    finished_run(tmp_path, content, 1)
    assert not (tmp_path / "run" / "stopped.json").exists()


def wait_for_rank_0(world: World) -> str:
    """Longer than the ranks otherwise wait for each other."""
    limited = world.new_cpu_group(1.0)
    with without_timeout(limited) as waiting, waiting.fail_together("working"):
        if world.is_main:
            time.sleep(3)
    with (
        without_timeout(limited) as waiting,
        pytest.raises((ValueError, FailedElsewhere), match="of rank 0"),
        waiting.fail_together("working"),
    ):
        if world.is_main:
            raise ValueError("of rank 0")
    return "done"


def test_rank_0_may_work_longer_than_the_timeout(ranks):
    assert ranks(2, wait_for_rank_0) == ["done", "done"]


def test_files_of_the_user_are_not_taken_for_stages(ranks, run_inputs, tmp_path):
    """A folder without the mark of a stage, one that was there before a first run, and links are left alone."""
    content, root = small_pipeline(run_inputs, evaluation={}), tmp_path / "run"
    important = tmp_path / "important"
    important.mkdir()
    (important / "thesis.txt").write_text("of the user")
    (important / "stage.json").write_text("{}")

    def plant(path, text):
        shutil.rmtree(root, ignore_errors=True)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (root / path).symlink_to(important)
        else:
            (root / path).write_text(text)
        return root / path

    for path, text, locked, words in (
        ("stages/final/notes.txt", "of the user", True, r"final contains notes\.txt, which no stage has written"),
        ("stages/final", "of the user", True, "final is a file"),
        ("stages/final", None, True, "final is a link"),
        ("stages", None, True, "stages is a link"),
        ("stages/other/notes.txt", "of the user", False, "contains stages, which no pipeline has written"),
        ("pipeline.yaml", "of the user", False, r"contains pipeline\.yaml, which no pipeline has written"),
        ("report.html", "of the user", False, r"contains report\.html, which no pipeline has written"),
    ):
        planted = plant(path, text)
        if locked:
            (root / "run.lock").touch()
        for _ in range(2):
            with pytest.raises(AssertionError, match=words):
                ranks(1, run_small, tmp_path, content)
            assert planted.is_symlink() if text is None else planted.read_text() == text
            assert (important / "thesis.txt").read_text() == "of the user"


@pytest.mark.slow
def test_a_changed_stage_is_repeated_only_by_request(ranks, run_inputs, tmp_path):
    content = small_pipeline(run_inputs, evaluation={})
    del content["stages"]["weak"], content["stages"]["final"]
    model = str(run_inputs / "model")
    content["stages"]["mined"]["model"] = model
    content["stages"]["tuned"] |= {"init": None}
    del content["stages"]["tuned"]["init"]
    content["stages"]["tuned"]["model"] = {"path": model, "pooling": "mean"}
    content["stages"]["mined"]["pooling"] = "mean"
    stages = tmp_path / "run" / "stages"
    ranks(1, run_small, tmp_path, content)
    began = record(tmp_path, "mined")["began"]
    ranks(1, run_small, tmp_path, content, "stages.tuned.train.log_every=2")  # without effect on the result
    assert record(tmp_path, "mined")["began"] == began

    with pytest.raises(AssertionError) as error:
        ranks(1, run_small, tmp_path, content, "stages.mined.negatives=1")
    for part in (ConfigError.__name__, "stages.mined: negatives was 2", "now 1", "from=mined", "mined, tuned"):
        assert part in str(error.value)
    ranks(1, run_small, tmp_path, content, "stages.mined.negatives=1", "from=mined", "until=mined")
    assert (stages / "mined.old-1").is_dir()
    assert (stages / "tuned.old-1").is_dir()
    assert not (stages / "tuned").exists()
    began = record(tmp_path, "mined")["began"]
    ranks(1, run_small, tmp_path, content, "stages.mined.negatives=1", "from=mined")  # as after an interruption
    assert record(tmp_path, "mined")["began"] == began
    assert record(tmp_path, "tuned")["ended"] is not None

    rows = next((stages / "mined").glob("*.jsonl"))
    rows.write_text(rows.read_text().replace("alpha", "omega"))
    with pytest.raises(AssertionError) as error:
        ranks(1, run_small, tmp_path, content, "stages.mined.negatives=1", "from=tuned")
    for part in (CheckpointError.__name__, str(rows), "from=mined"):
        assert part in str(error.value)
