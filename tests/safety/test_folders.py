"""Run directories and exports among the files of others: nothing outside them is written, nothing else is deleted."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.step_directory import delete_checkpoint, list_steps, recover_replaced, step_path
from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.formats.export_record import export_lock, replace_export, require_replaceable, write_record
from embedtrain.report.page import write_report
from tests.runs import options, run

STEPS = ("checkpoint.every=2", "checkpoint.keep=1", "tracking.report=true")


def victim_of(path: Path, folder: Path, kind: str) -> Path:
    """Replace a file or folder by a link to a copy of it elsewhere; returns the copy."""
    victim = folder / f"victim-{path.name}"
    if path.is_dir():
        shutil.copytree(path, victim)
        shutil.rmtree(path)
    else:
        victim.write_bytes(path.read_bytes() if path.exists() else b"untouched")
        victim.chmod(0o600)
        path.unlink(missing_ok=True)
    getattr(path, kind)(victim)
    return victim


def content(path: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {str(file.relative_to(path.parent)): (file.stat().st_mode, file.read_bytes()) for file in files}


def resume(world: World, run_inputs: Path, out: Path) -> str:
    """Resume a run and write its report; the sentence of an error."""
    try:
        run(world, *options(run_inputs, out, "train.steps=4", *STEPS))
        write_report([out], out / "report.html")
    except EmbedtrainError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def finished(ranks, run_inputs, tmp_path_factory) -> Path:
    """A run of two steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    ranks(1, run, *options(run_inputs, out, "train.steps=2", *STEPS))
    return out


def test_a_run_writes_through_none_of_its_files(ranks, run_inputs, finished, tmp_path):
    """All files that a resumed run replaces are links at once; those that it appends to are rejected one by one."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    appended = [out / name for name in ("run.lock", "sessions.jsonl", "metrics.jsonl", "sample", "query_metrics")]
    for path in appended:
        shutil.move(path, tmp_path / "kept")
        copy = shutil.copytree if (tmp_path / "kept").is_dir() else shutil.copy
        copy(tmp_path / "kept", path)
        victim = victim_of(path, tmp_path, "symlink_to")
        before = content(victim)
        (sentence,) = ranks(1, resume, run_inputs, out)
        assert str(path) in sentence
        assert content(victim) == before
        path.unlink()
        shutil.move(tmp_path / "kept", path)
    names = ["recipe.yaml", "stopped.json", "report.html", "architecture", "model"]
    names += [f"checkpoints/{step.name}" for _, step in list_steps(out / "checkpoints")]
    names += [".recipe.yaml.tmp", ".report.html.tmp", "recipe.tmp", "metrics.jsonl.tmp", ".embedtrain-model.lock"]
    victims = [victim_of(out / name, tmp_path, "symlink_to") for name in names if not name.endswith("lock")]
    before = [content(victim) for victim in victims]
    assert ranks(1, resume, run_inputs, out) == [""]
    assert [content(victim) for victim in victims] == before
    assert not (out / "model").is_symlink()
    assert [step for step, _ in list_steps(out / "checkpoints")] == [4]


@pytest.mark.parametrize("name", ["recipe.yaml", "architecture", "tokenizer", "sample", "model", "checkpoints/step-5"])
def test_files_of_the_user_are_not_taken_for_a_run(ranks, run_inputs, tmp_path, name):
    (tmp_path / name).mkdir(parents=True) if "." not in name else None
    notes = tmp_path / name / "notes.txt" if "." not in name else tmp_path / name
    notes.write_text("of the user")
    (sentence,) = ranks(1, resume, run_inputs, tmp_path)
    assert f"contains {notes.name if name == 'model' else name}" in sentence
    assert notes.read_text() == "of the user"
    assert {path.name for path in tmp_path.iterdir()} <= {Path(name).parts[0], "run.lock"}


@pytest.mark.parametrize(
    "setting",
    [
        "run: {dir: VICTIM}", "output_subdir: VICTIM", "sweep: {dir: VICTIM, subdir: x}", "run: {dir: '${output_dir}'}",
        "job_logging: {handlers: {file: {filename: VICTIM}}}", "runtime: {output_dir: VICTIM}, job: {chdir: true}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [["train.steps=1"], ["train.steps=0"], ["train.steps=1", "-m"]])
def test_settings_of_hydra_in_a_recipe_write_nothing(tmp_path, monkeypatch, setting, more):
    victim, recipe = tmp_path / "victim", tmp_path / "config" / "recipe" / "evil.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        f"# @package _global_\noutput_dir: {victim}\nhydra: {{{setting.replace('VICTIM', str(victim))}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ConfigError):
        compose_recipes(
            [
                "recipe=evil",
                f"--config-dir={tmp_path / 'config'}",
                "name=t",
                "model.path=m",
                "data.train=[rows.jsonl]",
                *more,
            ]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_deleted_checkpoints_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "weights").write_text("untouched")
    root = tmp_path / "checkpoints"
    root.mkdir()
    step_path(root, 1).symlink_to(victim)
    delete_checkpoint(step_path(root, 1))
    step_path(root, 2).with_name("step-00000002.replaced.tmp").symlink_to(victim)
    recover_replaced(root)
    delete_checkpoint(step_path(root, 2))
    assert list(root.iterdir()) == []
    assert (victim / "weights").read_text() == "untouched"


def export(output_dir: Path, text: str = "new") -> None:
    """Write an export of two files."""
    output_dir = require_replaceable(output_dir, output_dir.parent / "run")
    with export_lock(output_dir) as unfinished:
        (unfinished / "1_Pooling").mkdir(parents=True)
        (unfinished / "modules.json").write_text(text)
        (unfinished / "1_Pooling" / "config.json").write_text(text)
        write_record(unfinished)
        replace_export(output_dir, unfinished)


def test_an_export_replaces_exports_only(tmp_path):
    out, neighbours = tmp_path / "out", [tmp_path / name for name in ("out.tmp", "out.replaced.tmp", "out.lock")]
    for path in neighbours:
        path.mkdir()
        (path / "modules.json").write_text("of the user")
    export(out)
    export(out, "newer")
    assert (out / "modules.json").read_text() == "newer"
    assert [(path / "modules.json").read_text() for path in neighbours] == ["of the user"] * 3
    assert sorted(tmp_path.iterdir()) == sorted([out, *neighbours])
    for name, text in (
        ("notes.txt", "of the user"),
        ("1_Pooling/notes.txt", "of the user"),
        ("modules.json", "edited"),
    ):
        previous = (out / name).read_text() if (out / name).exists() else None
        (out / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"output_dir={out} contains {name}"):
            export(out)
        assert (out / name).read_text() == text
        (out / name).unlink() if previous is None else (out / name).write_text(previous)
    new = tmp_path / f"out.{'1' * 16}.tmp"
    shutil.copytree(out, new)
    (out / "notes.txt").write_text("added while the new export was written")
    with pytest.raises(ConfigError, match=r"contains notes\.txt"):
        replace_export(out, new)
    (out / "notes.txt").unlink()
    shutil.rmtree(new)
    shutil.copytree(neighbours[0], tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"theirs contains modules\.json"):
        export(tmp_path / "theirs")
    export(out)


def test_an_export_replaces_a_link_and_not_what_it_points_to(tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    (victim / "modules.json").write_text("of the user")
    for target in (victim, tmp_path / "missing", victim / "modules.json"):
        out.symlink_to(target)
        export(out)
        export(out)
        assert not out.is_symlink()
        shutil.rmtree(out)
    assert content(victim) == {"victim/modules.json": (victim.joinpath("modules.json").stat().st_mode, b"of the user")}


def test_what_a_killed_export_leaves_is_removed_or_restored(tmp_path):
    out, number = tmp_path / "out", "0" * 16
    export(out, "old")
    out.rename(tmp_path / f"out.{number}.replaced.tmp")  # killed between the two renames
    (tmp_path / f"out.{number}.tmp").mkdir()
    (tmp_path / f"outer.{number}.tmp").mkdir()
    with export_lock(out):
        assert (out / "modules.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", f"outer.{number}.tmp"]


def test_the_checkpoints_of_another_run_are_not_deleted(tmp_path):
    for name in ("other", "run", "disk"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "run.lock").touch()
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.rmdir()
    checkpoints.symlink_to(tmp_path / "other" / "checkpoints")
    with pytest.raises(ConfigError, match=f"{checkpoints} is a link"):
        RunDirectory(tmp_path / "run").require_own()
    checkpoints.unlink()
    checkpoints.symlink_to(tmp_path / "disk" / "checkpoints")
    RunDirectory(tmp_path / "run").require_own()


def test_a_copy_of_a_run_without_its_lock_is_rejected_until_it_has_one(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns("run.lock"))
    with pytest.raises(ConfigError, match=r"recipe\.yaml.*run\.lock"):
        RunDirectory(out).require_own()
    (out / "run.lock").touch()
    RunDirectory(out).require_own()


def test_the_files_of_a_run_have_the_mode_of_the_umask(finished):
    umask = os.umask(0)
    os.umask(umask)
    modes = {path: path.stat().st_mode & 0o777 for path in finished.rglob("*") if path.is_file()}
    assert {path.name for path, mode in modes.items() if mode != 0o666 & ~umask} == set()
