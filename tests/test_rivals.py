"""The comparison with other libraries: what it observes of a training, reads from checkpoints, and stores."""

import json
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import figures, result_tables
from benchmarks.inputs import MINILM
from benchmarks.rivals import docstrings, evaluate, failures, gradients, quality
from benchmarks.rivals.gradients import read_gradient
from benchmarks.rivals.launch import Observation, load_or, observe
from benchmarks.rivals.libraries import ACTIVE_WORDS, LIBRARIES, OURS, Library
from benchmarks.rivals.scripts.common import Training
from benchmarks.rivals.settings import SHAPES, Settings
from benchmarks.rivals.trainings import Comparison, draw

# A library whose training reports its steps, and whose second rank is a process of its own.
SCRIPT = """
import subprocess, sys, time
sys.path.insert(0, {scripts!r})
from common import read_training
training = read_training()
command = [sys.executable, "-c", "import time; time.sleep(60)"]
rank = subprocess.Popen(command, env={{"RANK": "1"}}, start_new_session=True)
print(rank.pid)
for step in range(1, training.steps + 1):
    time.sleep(0.2)
    training.report("step", step)
    if rank.poll() is not None:
        print("RuntimeError: rank 1 is gone")
        sys.exit(3)
rank.kill()
"""


class Fake(Library):
    """Runs one script in this environment."""

    script: Path

    def command(self, kind: str, settings: Path, ranks: int) -> list[str]:
        """Python, the script and its settings."""
        return [sys.executable, str(settings.parent.parent / "script.py"), str(settings)]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    fields = {name: getattr(SHAPES["dense"], name) for name in SHAPES["dense"].__slots__}
    return Training(
        **fields | {"steps": 4}, kind="dense", model="m", data="d", output=str(tmp_path / "run"),
        events=str(tmp_path / "events.jsonl"), ranks=2, seed=1, precision="fp32", max_grad_norm=1.0, save_every=0,
        resume=False,
    )  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Library:
    scripts = Path(docstrings.__file__).parent / "scripts"
    (tmp_path / "script.py").write_text(SCRIPT.format(scripts=str(scripts)))
    return Fake("fake", {"dense": "script.py"}, launcher="python")


def test_a_training_is_observed(library: Library, training: Training, tmp_path: Path) -> None:
    seen = observe(library, training, tmp_path / "work")
    assert (seen.finished, seen.first_step, seen.last_step, len(seen.steps)) == (True, 1, 4, 4)
    assert 0.2 <= seen.step_seconds < seen.seconds
    assert seen.peak_mib > 1


def test_a_killed_rank_and_the_last_error_are_observed(library: Library, training: Training, tmp_path: Path) -> None:
    seen = observe(
        library, training, tmp_path / "work", act_at=2, act=lambda ranks: ranks[1].send_signal(signal.SIGKILL)
    )
    assert seen.exit_code == 3
    assert seen.last_step < 4
    assert seen.acted_at is not None
    assert "rank 1 is gone" in seen.tail[-1]


def test_a_training_that_does_not_end_is_ended(library: Library, training: Training, tmp_path: Path) -> None:
    seen = observe(library, replace(training, steps=100), tmp_path / "work", timeout=1.0)
    assert seen.exit_code is None
    assert seen.seconds < 20
    assert not psutil.pid_exists(int(seen.tail[0]))


def test_gradients_are_the_first_moments_of_a_checkpoint(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    expected = torch.cat([weight.grad.double().flatten() for weight in weights if weight.grad is not None])
    for folder, name in (("transformers/checkpoint-1", "optimizer.pt"), ("accelerate", "optimizer.bin")):
        (tmp_path / folder).mkdir(parents=True)
        torch.save(optimizer.state_dict(), tmp_path / folder / name)
        torch.testing.assert_close(10 * read_gradient(tmp_path / folder), expected, rtol=1e-5, atol=1e-7)
    moments = [optimizer.state[weight]["exp_avg"] for weight in weights]
    for rank, rows in enumerate((slice(0, 2), slice(2, None))):  # shards of rows, as our checkpoints have them
        shard = {f"{n}.exp_avg": moment[rows].contiguous() for n, moment in enumerate(moments)}
        (tmp_path / "ours").mkdir(exist_ok=True)
        save_file(shard, tmp_path / "ours" / f"optimizer-0000{rank}-of-00002.safetensors")
    torch.testing.assert_close(10 * read_gradient(tmp_path / "ours"), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("exit_code", "read"), [(0, True), (1, True), (None, False)])
def test_the_gradient_of_ranks_that_crash_at_their_exit_is_read(
    exit_code: int | None, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(output=tmp_path, libraries=(OURS,))
    comparison, library = Comparison(settings, "dense"), LIBRARIES[OURS]
    monkeypatch.setattr(Comparison, "training", lambda *_, ranks, **__: SimpleNamespace(output=tmp_path, ranks=ranks))

    def observed(_: Library, training: Training, *__: object, timeout: float) -> Observation:
        return Observation(exit_code=0 if training.ranks == 1 else exit_code)

    monkeypatch.setattr(gradients, "observe", observed)
    monkeypatch.setattr(gradients, "read_gradient", lambda _: torch.ones(3))
    values = gradients._compare(comparison, library)
    assert [values[ranks] == {"norm": 1.0, "error": 0.0} for ranks in "124"] == [True, read, read]


def test_differences_of_weights_are_relative_to_what_training_changed(tmp_path: Path, training: Training) -> None:
    start, undisturbed, trained = (tmp_path / name for name in ("start", "undisturbed/run/model", "run/model"))
    values = {"layer.weight": torch.zeros(4)}, {"layer.weight": torch.ones(4)}, {"layer.weight": torch.full((4,), 1.5)}
    for folder, tensors in zip((start, undisturbed, trained), values, strict=True):
        folder.mkdir(parents=True)
        save_file(tensors, folder / "model.safetensors")
    change = failures._weights_change(replace(training, model=str(start)), tmp_path / "undisturbed")
    assert change == pytest.approx(0.5)


def test_the_message_of_a_failure_is_that_of_a_rank() -> None:
    lines = [
        "[rank1]: Traceback",
        "[rank1]: OSError: [Errno 28] No space left",
        "torch.ChildFailedError: ",
        "traceback : To",
    ]
    assert failures._message(Observation(tail=lines)) == "OSError: [Errno 28] No space left"
    assert failures._message(Observation(tail=["error: a|b", "ended"])) == "error: a\\|b"
    assert failures._message(Observation(tail=["ended"])) == "ended"


def test_the_set_of_library_docs_has_distinct_texts(tmp_path: Path) -> None:
    pairs = docstrings.pairs()
    assert len(pairs) > docstrings.NUM_QUERIES
    assert len({text for pair in pairs for text in pair}) == 2 * len(pairs)


def test_results_are_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        assert load_or(tmp_path / "a" / "b.json", lambda: {"calls": calls.append(1)}) == {"calls": None}
    assert len(calls) == 1


def test_another_library_goes_first_with_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "installed", True)
    comparison = Comparison(Settings(output=tmp_path, libraries=tuple(LIBRARIES)), "dense")
    names = [library.name for _, library in comparison.rounds()]
    first = names[:: len(comparison.libraries)]
    assert len(set(first)) == len(first) == 3
    assert all(names.count(name) == 3 for name in names)


def test_trainings_of_all_libraries_have_the_same_rows(tmp_path: Path) -> None:
    comparison = Comparison(Settings(output=tmp_path, libraries=(OURS,)), "dense")
    comparison.__dict__["model"] = tmp_path
    trainings = [
        comparison.training(library, "steps-1", seed=1, rows=64)
        for library in LIBRARIES.values()
        if "dense" in library.scripts
    ]
    assert len({training.data for training in trainings}) == 1
    assert len({training.output for training in trainings}) == len(trainings)
    rows = [json.loads(line) for line in Path(trainings[0].data).read_text().splitlines()]
    assert len({row["query"] for row in rows}) == 64


def test_rows_are_drawn_by_the_seed_and_without_equal_texts() -> None:
    rows = [{"query": f"q{n}", "pos": [f"d{n // 2}"], "neg": [f"n{n}", f"m{n}"]} for n in range(20)]
    drawn = draw(rows, 6, 1, 1)
    assert drawn == draw(rows, 6, 1, 1) != draw(rows, 6, 2, 1)
    assert [row["neg"] for row in drawn] == [[f"n{row['query'][1:]}"] for row in drawn]
    distinct = draw(rows, 10, 1, 0, distinct=True)
    assert sorted(row["pos"][0] for row in distinct) == sorted(f"d{n}" for n in range(10))


def test_real_tokens_are_counted_with_truncation(tmp_path: Path, training: Training) -> None:
    rows = [{"query": "a b c", "pos": ["d " * 200], "neg": ["e f"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_pairs = replace(training, kind="reranker", negatives=1)
    for planned, expected in ((training, 5 + 64), (replace(training, negatives=1), 5 + 64 + 4), (of_pairs, 96 + 8)):
        of_rows = replace(planned, model=MINILM, data=str(tmp_path / "rows.jsonl"))
        measured = quality.Measured(LIBRARIES[OURS], of_rows, Observation(), {})
        assert quality.tokens_per_step(measured) == expected * of_rows.global_batch


def test_tables_and_figures_of_stored_results(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest library sets the wall time; another one trains for more steps in it."""
    monkeypatch.setattr(Library, "installed", True)
    settings = Settings(output=tmp_path, libraries=(OURS, "accelerate"), kinds=("dense",))
    for folder in ("start", "library-docs", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "start" / "done").touch()
    (tmp_path / "start" / "dense").symlink_to(MINILM)
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "pos": ["b"], "neg": []}\n')
    stored = replace(training, model=MINILM, data=str(tmp_path / "rows.jsonl"), steps=30)
    metrics = {"dev-en": 0.5, "library-docs": 0.25}

    def store(name: str, seconds: float, **changes: int) -> None:
        steps = [5.0 + seconds * step for step in range(8)]
        seen = Observation(exit_code=0, seconds=5 + 30 * seconds, steps=steps, peak_mib=100.0)
        content = {"training": asdict(replace(stored, **changes)), "seen": asdict(seen), "metrics": metrics}
        (tmp_path / "results" / f"dense-{name}.json").write_text(json.dumps(content))

    for library, seconds in ((OURS, 1.0), ("accelerate", 2.0)):
        for name in ("short-fp32", "short-bf16"):
            store(f"{library}-{name}", seconds)
        for seed in settings.seeds:
            store(f"{library}-steps-{seed}", seconds, seed=seed)
            store(f"{library}-time-{seed}", seconds, seed=seed, steps=60)
    (tmp_path / "results" / "dense-before.json").write_text(json.dumps(metrics))
    tables = quality.measure(settings)
    assert "after 65 s of wall time" in tables
    assert [line.split(" | ")[1] for line in tables.splitlines() if line.startswith("| accelerate | 30")] == [
        "30",
        "30",
    ]
    assert "| accelerate | fp32 | 192 (192 to 192) | 2.00 (2.00 to 2.00) |" in tables
    (tmp_path / "results.json").write_text(json.dumps(quality.summary(settings)))
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    figures.main()
    assert "accelerate" in (tmp_path / "benchmarks-quality-dark.svg").read_text()
    page = result_tables.with_tables("<!-- results: speed -->\nold\n<!-- end -->\nrest\n", tmp_path / "results.json")
    assert page.splitlines()[-3:] == ["", "<!-- end -->", "rest"]
    row = "| accelerate, a loop written by hand | 2.0 (2.0 to 2.0) times |"
    assert page.splitlines()[2:6] == ["| library | dense |", "| --- | --- |", "| embedtrain | 1.00 s |", row]
    for seed in settings.seeds:  # 2.1 s before the slowest: one more step
        store(f"{OURS}-steps-{seed}", 1.93, seed=seed)
    assert Comparison(settings, "dense").equal_time(LIBRARIES[OURS], seed=1).training.steps == 60


def test_the_second_checkpoint_is_removed(tmp_path: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-8", "model/checkpoint-8", "step_4", "step_8", "checkpoint-18"):
        (tmp_path / name).mkdir(parents=True)
    failures._remove_second_checkpoint(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"checkpoint-4", "model", "step_4", "checkpoint-18"}


def test_active_words_of_sparse_models_are_a_metric() -> None:
    data = evaluate.RetrievalSet({"q": "a"}, {"d1": "b", "d2": "c"}, {"q": {"d1": 1}})
    for words, expected in ((None, {"set": 1.0}), (torch.tensor([3, 2]), {"set": 1.0, ACTIVE_WORDS: 2.5})):
        matrix = torch.tensor([[0.9, 0.8]])
        assert evaluate.evaluate(lambda _queries, _documents, found=(matrix, words): found, {"set": data}) == expected
    before = {"set": 0.5, ACTIVE_WORDS: 120.4}
    assert quality.quality_table(before, {}).splitlines()[-1] == "| before training |  |  | 0.5000 | 120 |"


def test_the_tables_of_the_documentation_are_those_of_the_stored_results() -> None:
    page = result_tables.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- results: ") == 7
    assert page == result_tables.with_tables(page, figures.RESULTS)
