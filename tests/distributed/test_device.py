"""Memory of a rank's device, errors when it is exhausted, and threads that use a GPU, whose memory is stubbed."""

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.config.recipe import CheckpointConfig
from embedtrain.data.prefetch import Prefetcher
from embedtrain.distributed.device import (
    advise_when_exhausted,
    cgroup_memory,
    deterministic_algorithms,
    explain_out_of_memory,
    free_memory,
    return_freed_memory,
    thread_initializer,
    total_memory,
)
from embedtrain.distributed.watchdog.watchdog import activity, set_activity
from embedtrain.distributed.world import joined_world
from embedtrain.errors import OutOfMemory
from tests.memory import anonymous_mb, freed_memory

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB: the driver has 10, and of the 65 that torch has reserved it uses 25."""
    metrics: dict[str, Callable[..., object]] = {
        "mem_get_info": lambda device: (10 * GIB, 80 * GIB),
        "memory_reserved": lambda device: 65 * GIB,
        "memory_allocated": lambda device: 25 * GIB,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
    }
    for name, measure in metrics.items():
        monkeypatch.setattr(torch.cuda, name, measure)


def test_memory_that_is_reserved_but_not_used_is_free(gpu):
    assert free_memory(GPU) == 50 * GIB
    assert total_memory(GPU) == 80 * GIB


def test_ranks_of_a_node_share_its_memory():
    assert total_memory(CPU, 4) == total_memory(CPU) // 4
    assert free_memory(CPU, 4) < free_memory(CPU) / 3


@pytest.mark.parametrize(
    ("own", "limits", "lowest"),
    [
        # A job of SLURM, which sees the cgroups of the host.
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", {"/system.slice": None,
         "/system.slice/slurmstepd.scope/job_7": 64, "/system.slice/slurmstepd.scope/job_7/step_0": 60}, 60),
        ("0::/job_7/step_0", {"/job_7": 32, "/job_7/step_0": 64, "/job_8": 8}, 32),
        ("0::/", {"": 16}, 16),  # a container with a namespace of its own
        ("0::/docker/1a2b", {"": 16}, 16),  # without one: its own cgroup is mounted at the root
        ("0::/../../outside", {"": 16}, 16),
        ("12:cpu,cpuacct:/\n4:memory:/slurm/uid_1/job_7\n0::/", {"memory:/slurm/uid_1/job_7": 64, "memory:": 512}, 64),
        ("0::/user.slice", {"/user.slice": None}, None),
        (None, {"": 16}, 16),
    ],
)  # fmt: skip
def test_the_lowest_limit_of_the_cgroups_of_this_process(tmp_path, own, limits, lowest):
    for place, limit in limits.items():
        first, _, path = place.rpartition(":")
        folder = tmp_path / "cgroup" / first / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        for name, value in zip(names, (limit, limit and limit - 5), strict=True):
            (folder / name).write_text("max\n" if value is None else f"{value}\n")
    if own is not None:
        (tmp_path / "own").write_text(f"{own}\n")
    expected = (None, None) if lowest is None else (lowest, lowest - 5)
    assert cgroup_memory(tmp_path / "cgroup", tmp_path / "own") == expected


def test_freed_memory_is_returned_to_the_system():
    with freed_memory():
        before = anonymous_mb()
        return_freed_memory()
        assert before - anonymous_mb() > 100


@pytest.mark.parametrize(
    ("error", "allocation"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), "an allocation of 2.50 GiB"),
        (MemoryError("Unable to allocate 3.00 GiB for an array with shape (1,)"), "an allocation of 3.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."),
         "an allocation of 2.0 GiB"),
    ],
)  # fmt: skip
def test_the_message_names_what_is_used_and_what_to_lower(gpu, error, allocation):
    advise_when_exhausted("", "lower this")
    advise_when_exhausted("evaluating", "lower that")
    set_activity("training", 7)
    metrics = "this process uses 25.0 GiB of 80.0 GiB, 50.0 GiB are free"
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(GPU):
        raise error
    assert str(caught.value) == f"out of memory while training, step 7: {allocation} failed, {metrics}; lower this"
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(GPU), activity("evaluating dev"):
        raise error
    assert (
        str(caught.value) == f"out of memory while evaluating dev, step 7: {allocation} failed, {metrics}; lower that"
    )


def test_what_a_models_files_need_is_no_matter_of_chunks(gpu):
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")
    for phase in ("opening the model", "reading the model's weights on rank 0"):
        with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(CPU), activity(phase):
            raise error
        assert "the model's files need more" in str(caught.value)
        assert "chunk_tokens" not in str(caught.value)


def test_memory_of_the_host_that_cuda_cannot_lock_is_no_matter_of_chunks(gpu):
    advise_when_exhausted("", "lower train.chunk_tokens")
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(GPU), activity("preparing a batch"):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    message = str(caught.value)
    assert "preparing a batch" in message
    assert "ulimit -l" in message
    assert "chunk_tokens" not in message


def test_other_errors_are_unchanged():
    with pytest.raises(RuntimeError, match="cannot be multiplied"), explain_out_of_memory(CPU):
        raise RuntimeError("mat1 and mat2 cannot be multiplied")


def test_threads_use_the_gpu_of_the_thread_that_starts_them(monkeypatch, tmp_path):
    devices: dict[int, int] = {}  # by thread; torch keeps a current device for each thread as well
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({threading.get_ident(): device}))
    thread_initializer()()
    assert not devices, "there is no GPU"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        threads = list(Prefetcher(lambda index: threading.get_ident(), 0, 9, workers=2))
        assert {devices.get(thread) for thread in threads} == {3}
        assert threading.get_ident() not in devices
        devices.clear()
        with joined_world() as world:
            checkpointer = Checkpointer(tmp_path, CheckpointConfig(), world, metadata={}, log=print)
            patch.undo()
            model = torch.nn.Linear(2, 2)
            checkpointer.save(model, torch.optim.AdamW(model.parameters()), {"step": 1})
            checkpointer.wait()
    assert list(devices.values()) == [3]


@pytest.mark.parametrize("variable", [None, ":16:8"])
def test_deterministic_algorithms_are_restored(monkeypatch, variable):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", variable)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == variable
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (variable or ":4096:8")
    assert not torch.are_deterministic_algorithms_enabled()
