"""The fraction of a step in which ranks communicate: waiting for a late rank counts, computation does not."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.distributed import Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from embedtrain.config.recipe import TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.training import profile
from embedtrain.training.profile import (
    StepProfiler,
    covered_length,
    exposed_nccl_seconds,
    gpu_profile,
    timed_waits,
)


def measure(world: World, late: float, both: float, collective: str) -> list[dict[str, float]]:
    """Six steps in which both ranks work and rank 0 is late; the third and every second after it are measured."""
    # No step is profiled, so that nothing is written or printed.
    profiler = StepProfiler(TrackingConfig(), world, Path(), None, log_every=1, rows_between=2)
    mesh = init_device_mesh("cpu", (world.size,))
    measured = []
    for _ in range(6):
        world.barrier()
        with profiler.measure_communication():
            time.sleep(both + (late if world.rank == 0 else 0.0))
            if collective == "barrier":
                world.barrier()
            else:  # how the norm of shards is reduced
                distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None).sum().full_tensor()
        measured.append(profiler.pop_communication())
    return measured


@pytest.mark.parametrize("collective", ["barrier", "tensor"])
def test_waiting_for_a_late_rank_is_communication(ranks, collective):
    for measured in ranks(2, measure, 0.3, 0.0, collective):
        assert [list(step) for step in measured] == [[], [], ["communication"], [], ["communication"], []]
        # Rank 1 only waits, rank 0 never does.
        assert 0.4 < measured[2]["communication"] < 0.75
        assert 0.4 < measured[4]["communication"] < 0.75


def test_computation_is_not_communication(ranks):
    for measured in ranks(2, measure, 0.0, 0.3, "barrier"):
        assert measured[2]["communication"] < 0.3


def test_a_single_rank_is_not_measured(ranks):
    assert ranks(1, measure, 0.0, 0.0, "barrier") == [[{}] * 6]


def measured_steps(world: World, wanted: bool | None) -> list[dict[str, float]]:
    """Of four steps; what the profiler would measure is 0.25."""
    profiler = StepProfiler(TrackingConfig(communication=wanted), world, Path(), None, log_every=1, rows_between=1)
    measured = []
    with mock.patch.object(profile, "gpu_profile", lambda device: contextlib.nullcontext(lambda: 0.25)):
        for _ in range(4):
            with mock.patch.object(time, "perf_counter", iter((1.0, 2.0)).__next__), profiler.measure_communication():
                pass
            measured.append(profiler.pop_communication())
    return measured


@pytest.mark.parametrize(("wanted", "is_measured"), [(None, False), (False, False), (True, True)])
def test_a_gpu_is_profiled_only_if_that_is_asked_for(cuda_ranks, wanted, is_measured):
    """Its profiler takes seconds to start and excludes others, such as Nsight Systems."""
    steps = [{"communication": 0.25} if is_measured else {}] * 2
    assert cuda_ranks(2, measured_steps, wanted) == [[{}, {}, *steps]] * 2


def measured_on_cpu(world: World) -> bool:
    profiler = StepProfiler(TrackingConfig(communication=False), world, Path(), None, log_every=1, rows_between=1)
    for _ in range(4):
        with profiler.measure_communication():
            world.barrier()
    return bool(profiler.pop_communication())


def test_waits_on_a_cpu_are_not_timed_if_that_is_declined(ranks):
    assert ranks(2, measured_on_cpu) == [False, False]


def wait_in_thread(world: World) -> tuple[float, bool, bool]:
    """Seconds of waits while another thread waits; whether torch is restored, also after an error."""
    wait, background = Work.wait, world.new_cpu_group(30.0)
    with timed_waits() as seconds:
        thread = threading.Thread(target=background.barrier)
        time.sleep(0.3 * world.rank)
        thread.start()
        thread.join()
    restored = Work.wait is wait
    with pytest.raises(ZeroDivisionError), timed_waits():
        raise ZeroDivisionError
    torch.distributed.destroy_process_group(background.group)
    return seconds(), restored, Work.wait is wait


def test_other_threads_are_not_timed_and_torch_is_restored(ranks):
    assert ranks(2, wait_in_thread) == [(0.0, True, True)] * 2


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=annotation)


def test_communication_that_overlaps_with_computation_is_not_counted():
    events = [
        event("ncclDevKernel_AllGather_RING_LL", 0, 400_000),
        event("ncclDevKernel_ReduceScatter", 900_000, 1_300_000),
        event("gemm", 100_000, 200_000),
        event("gelu", 150_000, 300_000),
        event("gemm", 1_200_000, 1_250_000),
        event("cudaLaunchKernel", 0, 1_300_000, device=DeviceType.CPU),
        event("FSDP::all_gather", 0, 1_300_000, annotation=True),
    ]
    assert exposed_nccl_seconds(events) == pytest.approx(0.1 + 0.1 + 0.3 + 0.05)
    assert exposed_nccl_seconds(events[2:]) == 0
    assert exposed_nccl_seconds(events[5:]) != exposed_nccl_seconds(events[5:]), "NaN: the profile has no GPU kernel"
    assert covered_length([(0, 1), (0.5, 2), (5, 6), (5.5, 5.75)]) == 3


def test_there_is_no_result_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("see test_a_real_profile_has_kernels")
    with gpu_profile(torch.device("cuda")) as seconds:
        pass
    assert seconds() != seconds()


@pytest.mark.gpu
def test_a_real_profile_has_kernels(capfd):
    device = torch.device("cuda", 0)
    left = torch.randn(2048, 2048, device=device)
    with gpu_profile(device) as seconds:
        for _ in range(20):
            left = left @ left / 100
    assert seconds() == 0.0
    assert "profiler" not in "".join(capfd.readouterr())
