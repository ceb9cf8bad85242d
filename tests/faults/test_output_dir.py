"""What can go wrong with the directory of a run: a second run, a full disk, a read-only one, one that is gone."""

import shutil
import signal
import subprocess

import pytest

from tests.faults.runs import finish, start, training_result


def test_two_runs_in_one_directory(folder, undisturbed):
    """The second is refused with who holds it; the first does not notice."""
    first = start(folder, "shared").until(lambda run: run.last_step >= 2)
    first.send(signal.SIGSTOP)
    second = start(folder, "shared", "parallel.timeout=20")
    codes = second.wait()
    first.send(signal.SIGCONT)
    assert codes == [1, 1], second.text
    (error,) = second.errors
    assert "output_dir=shared is in use by another run (process " in error
    assert f"process {first.processes[0].pid} on " in error
    assert "2 ranks, since 20" in error
    assert "wait for it, stop it, or choose another output_dir" in error
    assert first.wait() == [0, 0]
    assert training_result(folder / "shared") == undisturbed


@pytest.fixture
def small_disk(folder):
    """A file system of its own with room for a checkpoint or two."""
    place = folder / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "none", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def remount(place, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def test_a_full_disk_and_one_that_is_read_only(folder, undisturbed, small_disk):
    options = ("checkpoint.keep=9", "tracking.report=false")  # whose sample would take the room of a checkpoint
    run = start(folder, "disk/run", *options)
    assert run.wait() == [1, 1], run.text
    (error,) = run.errors
    assert "saving the checkpoint of step " in error
    assert "No space left on device" in error or "room" in error, error
    checkpoints = small_disk / "run" / "checkpoints"
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept, "the checkpoints before are there"
    assert all("tmp" not in name for name in kept)
    remount(small_disk, "ro")
    run = start(folder, "disk/run", *options)
    assert run.wait() == [1, 1], run.text
    (error,) = run.errors
    assert "Read-only file system" in error
    remount(small_disk, "rw,size=50m")
    again = finish(folder, "disk/run", *options)
    assert f"resuming from disk/run/checkpoints/{kept[-1]}" in again.text
    assert training_result(small_disk / "run") == undisturbed


def test_a_directory_that_vanishes(folder, undisturbed):
    run = start(folder, "vanishes").until(lambda run: (run.output_dir / "checkpoints" / "step-00000003").exists())
    shutil.move(folder / "vanishes", folder / "elsewhere")
    assert run.wait() == [1, 1], run.text
    assert len(run.errors) == 1
    vanished = "output_dir=vanishes has disappeared during the run: restore it"
    assert vanished in run.errors[0] or "No such file or directory" in run.errors[0], "seen before a save, or in one"
    shutil.rmtree(folder / "vanishes", ignore_errors=True)  # what a save that was just beginning has made
    shutil.move(folder / "elsewhere", folder / "vanishes")
    finish(folder, "vanishes")
    assert training_result(folder / "vanishes") == undisturbed


def test_a_file_where_the_directory_shall_be(folder):
    (folder / "file").write_text("mine")
    run = start(folder, "file")
    assert run.wait() == [1, 1]
    assert len(run.errors) == 1
    assert "making the run directory failed: File exists: file" in run.errors[0]
    assert (folder / "file").read_text() == "mine"
