"""A rank fails or hangs: all ranks end with one message that names the rank, the activity and the cause."""

import re
import shutil
import signal
import socket
import time

import pytest

from tests.faults.hooks import (
    DiskFails,
    InStep,
    MemoryExhausted,
    NcclError,
    SlowEnd,
    SlowSave,
    verify_cache_in_thread,
)
from tests.faults.runs import finish, start, training_result


@pytest.mark.slow
def test_an_unexpected_error_on_one_rank(folder, undisturbed):
    """Its traceback is printed once and ends with the message; no agent terminates the other ranks."""
    run = start(folder, "raised", hook=InStep(rank=1, step=4), agent=False)
    assert run.wait() == [1, 1], run.text
    assert run.text.count("Traceback") == 1
    saved = "the newest complete checkpoint is raised/checkpoints/step-00000004: the same command resumes from it"
    assert run.errors == [
        f"error: rank 1 on {socket.gethostname()} failed while training, step 5: ValueError: a cosmic ray; {saved}"
    ]
    finish(folder, "raised")
    assert training_result(folder / "raised") == undisturbed


@pytest.mark.slow  # half a minute of waiting
@pytest.mark.parametrize("fault", [InStep(1, 3), InStep(0, 3, seconds=120)])
def test_a_pending_checkpoint_is_finished(folder, undisturbed, fault):
    """A save takes longer than a failed run has to end: all ranks finish it first, the failing one as well."""
    out = f"pending-{fault.rank}"
    slow = SlowSave(0, 9.0 if fault.rank else 18.0, fault)
    run = start(folder, out, "parallel.step_timeout=8", hook=slow)
    assert run.wait() == [1, 1], run.text
    saved = f"the newest complete checkpoint is {out}/checkpoints/step-00000003: the same command resumes from it"
    (error,) = run.errors
    assert error.startswith(f"error: rank {fault.rank} on ") and error.endswith(saved), run.text
    assert run.text.count("the ranks are still saving the checkpoint of step 3, for at most 10 minutes") == 1
    again = finish(folder, out)
    assert f"resuming from {out}/checkpoints/step-00000003" in again.text
    assert training_result(folder / out) == undisturbed


def test_a_disk_that_fails_is_no_damage(folder, undisturbed):
    """One rank cannot read the newest checkpoint: nothing older is resumed from, and nothing deleted."""
    out = folder / "unread"
    shutil.copytree(folder / "undisturbed", out)
    before = sorted(out.glob("checkpoints/*/*"))
    run = start(folder, out.name, hook=DiskFails(1))
    assert run.wait() == [1, 1], run.text
    (error,) = run.errors
    assert "unread/checkpoints/step-00000012/" in error
    assert "cannot be read (Input/output error): it may be intact" in error
    assert error.endswith("(rank 1)")
    assert sorted(out.glob("checkpoints/*/*")) == before
    assert "step-00000012 is the end of this run" in finish(folder, out.name).text
    assert training_result(out) == undisturbed


@pytest.mark.slow  # tests/distributed/watchdog/test_watchdog.py
def test_slow_checks_and_uploads_do_not_fail_a_run(folder, undisturbed):
    """40 minutes each, scaled with the time-out of 30 minutes."""
    run = start(folder, "uploads", "parallel.timeout=18", "export.push_to_hub=me/model", hook=SlowEnd(24.0))
    assert run.wait(180) == [0, 0], run.text
    assert not run.errors
    assert training_result(folder / "uploads") == undisturbed


def test_a_hanging_rank(folder):
    """One of three ranks: the others name it and its activity, and it prints its stack."""
    run = start(folder, "hangs", "parallel.step_timeout=12", size=3, hook=InStep(rank=2, step=4, seconds=120))
    assert run.wait() == [1, 1, 1], run.text
    assert len(run.errors) == 1
    assert f'rank 2 on {socket.gethostname()} hangs: alive, but in "training, step 5" for ' in run.errors[0]
    assert "stack of rank 2 when the other ranks gave up:" in run.text
    assert "hooks.py" in run.text, "the stack names the file"


@pytest.mark.slow
def test_a_damaged_cache_that_is_verified_during_the_run(folder, undisturbed):
    """All ranks end with one sentence and without a checkpoint; the next start builds the file again."""
    finish(folder, "first", "data.cache_dir=damaged")
    (path,) = (folder / "damaged").glob("tokens-*/joined/values.bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    run = start(folder, "second", "data.cache_dir=damaged", hook=verify_cache_in_thread)
    assert run.wait() == [1, 1], run.text
    assert "Traceback" not in run.text
    (error,) = run.errors
    assert f"{path.relative_to(folder)} is damaged in the cache: start the same command again" in error
    assert not list((folder / "second" / "checkpoints").glob("step-*"))
    finish(folder, "second", "data.cache_dir=damaged")
    assert path.read_bytes() != content
    assert training_result(folder / "second") == undisturbed


@pytest.mark.slow
def test_an_exhausted_memory(folder):
    """One sentence: what failed, what is used, what was planned, and the options to lower."""
    run = start(folder, "exhausted", hook=MemoryExhausted(rank=1, step=4))
    assert run.wait() == [1, 1], run.text
    assert "Traceback" not in run.text
    (error,) = run.errors
    requested = "an allocation of 4.0 EiB|an allocation of 4,194,304.0 TiB"
    assert re.search(f"out of memory while training, step 5: ({requested}) failed, this process uses ", error), error
    assert re.search(r" of [\d.]+ GiB, [\d.]+ GiB are free; [\d.]+ .iB were planned for a step: ", error), error
    assert "lower train.chunk_tokens=16384" in error
    assert "parallel.activation_checkpointing=true" in error


@pytest.mark.slow
def test_an_error_that_only_nccl_reports(folder):
    """The main thread waits for a GPU that waits for a lost rank; the time-out of a step is ten minutes."""
    run = start(folder, "nccl", hook=NcclError(rank=0, step=4))
    run.processes[0].join(60)
    code = run.processes[0].exitcode
    run.end()
    assert code == 1, run.text
    (error,) = run.errors
    assert f"rank 1 on {socket.gethostname()} ended or hangs (no heartbeat for " in error
    assert "while training, step " in error


@pytest.mark.slow
def test_a_suspended_rank(folder, undisturbed):
    run = start(folder, "suspended", "parallel.timeout=12").until(lambda run: run.last_step >= 4)
    run.send(signal.SIGSTOP, 0)
    run.processes[1].join(60)
    assert run.processes[1].exitcode == 1
    assert len(run.errors) == 1
    assert f"rank 0 on {socket.gethostname()} ended or hangs (no heartbeat for " in run.errors[0]
    assert "is suspended) while " in run.errors[0]
    run.send(signal.SIGCONT, 0)
    started = time.monotonic()
    assert run.wait() == [1, 1]
    assert time.monotonic() - started < 30
    finish(folder, "suspended")
    assert training_result(folder / "suspended") == undisturbed
