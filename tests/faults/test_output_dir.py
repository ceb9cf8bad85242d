"""Faults of the output directory: a second run, a full disk, a read-only disk, a directory that disappears."""

import shutil
import signal
import subprocess

import pytest

from tests.faults.runs import finish, start, training_result


@pytest.mark.slow
def test_two_runs_in_one_directory(folder, undisturbed):
    """The second is rejected with a description of the first, which is not affected."""
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
    assert first.wait() == [0, 0]
    assert training_result(folder / "shared") == undisturbed


@pytest.fixture
def small_disk(folder):
    """A file system with space for one or two checkpoints."""
    mount_point = folder / "disk"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=920k", "none", mount_point], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    yield mount_point
    subprocess.run(["umount", "-l", mount_point], check=True)


def remount(mount_point, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", mount_point], check=True)


@pytest.mark.slow
def test_a_full_disk_and_a_read_only_disk(folder, undisturbed, small_disk):
    options = ("checkpoint.keep=9", "tracking.report=false")  # the sample needs as much space as a checkpoint
    run = start(folder, "disk/run", *options)
    assert run.wait() == [1, 1], run.text
    (error,) = run.errors
    assert "saving the checkpoint of step " in error
    assert "No space left on device" in error or "room" in error, error
    checkpoints = small_disk / "run" / "checkpoints"
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept, "earlier checkpoints remain"
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


@pytest.mark.slow
def test_a_directory_that_disappears(folder, undisturbed):
    run = start(folder, "vanishes").until(lambda run: (run.output_dir / "checkpoints" / "step-00000003").exists())
    shutil.move(folder / "vanishes", folder / "elsewhere")
    assert run.wait() == [1, 1], run.text
    assert len(run.errors) == 1
    vanished = "output_dir=vanishes has disappeared during the run: restore it"
    assert vanished in run.errors[0] or "No such file or directory" in run.errors[0], "before a save, or during one"
    shutil.rmtree(folder / "vanishes", ignore_errors=True)  # created by a save that had just started
    shutil.move(folder / "elsewhere", folder / "vanishes")
    finish(folder, "vanishes")
    assert training_result(folder / "vanishes") == undisturbed


@pytest.mark.slow
def test_output_dir_is_a_file(folder):
    (folder / "file").write_text("mine")
    run = start(folder, "file")
    assert run.wait() == [1, 1]
    assert len(run.errors) == 1
    assert "creating the run directory failed: File exists: file" in run.errors[0]
    assert (folder / "file").read_text() == "mine"
