"""The share of a step that ranks wait for one another: a late rank shows, computing does not."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.distributed import Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from embedtrain.distributed.world import World
from embedtrain.training.communication import (
    CommunicationMeter,
    covered_length,
    exposed_nccl_seconds,
    gpu_profile,
    timed_waits,
)


def shares(world: World, late: float, both: float, way: str) -> list[dict[str, float]]:
    """Of six steps in which both ranks work, and rank 0 comes late; every second is measured from the third on."""
    communication = CommunicationMeter(world, log_every=1)
    communication._apart = 2
    mesh = init_device_mesh("cpu", (world.size,))
    found = []
    for _ in range(6):
        world.barrier()
        with communication.of_step():
            time.sleep(both + (late if world.rank == 0 else 0.0))
            if way == "barrier":
                world.barrier()
            else:  # as a norm over shards is made whole
                distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None).sum().full_tensor()
        found.append(communication.take())
    return found


@pytest.mark.parametrize("way", ["barrier", "tensor"])
def test_a_late_rank_shows(ranks, way):
    for found in ranks(2, shares, 0.3, 0.0, way):
        assert [list(share) for share in found] == [[], [], ["communication"], [], ["communication"], []]
        # Rank 1 does nothing but wait, rank 0 never.
        assert 0.4 < found[2]["communication"] < 0.75
        assert 0.4 < found[4]["communication"] < 0.75


def test_work_is_no_communication(ranks):
    for found in ranks(2, shares, 0.0, 0.3, "barrier"):
        assert found[2]["communication"] < 0.3


def alone(world: World) -> list[dict[str, float]]:
    return shares(world, 0.0, 0.0, "barrier")


def test_who_is_alone_waits_for_nobody(ranks):
    assert ranks(1, alone) == [[{}] * 6]


def beside(world: World) -> tuple[float, bool, bool]:
    """Seconds of waiting while another thread waits; whether torch is as before, also after an error."""
    before, new_cpu_group = Work.wait, world.new_cpu_group(30.0)
    with timed_waits() as seconds:
        thread = threading.Thread(target=new_cpu_group.barrier)
        time.sleep(0.3 * world.rank)
        thread.start()
        thread.join()
    as_before = Work.wait is before
    with pytest.raises(ZeroDivisionError), timed_waits():
        raise ZeroDivisionError
    torch.distributed.destroy_process_group(new_cpu_group.group)
    return seconds(), as_before, Work.wait is before


def test_other_threads_are_not_clocked_and_torch_is_left_as_it_was(ranks):
    assert ranks(2, beside) == [(0.0, True, True)] * 2


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=annotation)


def test_what_runs_beside_other_kernels_is_hidden():
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
    assert exposed_nccl_seconds(events[5:]) != exposed_nccl_seconds(events[5:]), "NaN: there was no profile of a GPU"
    assert covered_length([(0, 1), (0.5, 2), (5, 6), (5.5, 5.75)]) == 3


def test_where_nothing_can_be_profiled_there_is_no_figure():
    if torch.cuda.is_available():
        pytest.skip("with a GPU there is something to profile: test_a_real_profile_has_kernels")
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
