"""Copies of a snapshot for asynchronous saves: their memory, and on which device they wait."""

from pathlib import Path

import torch
from torch import Tensor

from embedtrain.checkpoint.snapshot import Snapshot, Staging
from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.checkpoint.tensor_files import LocalShard, ShardPosition, TensorSpec
from embedtrain.distributed.world import World
from tests.checkpoint.live import Live, open_checkpoints, state_of
from tests.pretend_cuda.device import host_reads
from tests.small import parallel


def snapshot_of(tensors: dict[str, Tensor]) -> Snapshot:
    shards = {name: LocalShard(TensorSpec.of(rows), rows, 0, sharded=rows.dim() == 2) for name, rows in tensors.items()}
    return Snapshot(ShardPosition(0, 0, 1), {"weights": shards})


SIZES = {"matrix": (129, 257), "row": (3,), "number": (), "empty": (0, 4), "last": (65, 1)}


def test_copies_of_any_shape_share_memory():
    """torch rounds every allocation of pinned memory up to a power of two, which must not double the memory."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = {f"{name} {dtype}": torch.ones(shape, dtype=dtype) for name, shape in SIZES.items() for dtype in dtypes}
    tensors |= {f"layer {i}": torch.ones(1025, 100) for i in range(36)}
    staging = Staging()
    copies = [shard.rows for shard in staging.copy(snapshot_of(tensors)).tensors["weights"].values()]
    assert all(copy.equal(tensor) for copy, tensor in zip(copies, tensors.values(), strict=True))
    blocks = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies}
    rounded = sum(1 << (size - 1).bit_length() for size in blocks.values())
    assert rounded <= 1.1 * sum(tensor.nbytes for tensor in tensors.values())
    for tensor in tensors.values():
        tensor.zero_()
    assert all(copy.all() for copy in copies)
    again = [shard.rows for shard in staging.copy(snapshot_of(tensors)).tensors["weights"].values()]
    assert [copy.data_ptr() for copy in again] == [copy.data_ptr() for copy in copies]
    assert not any(copy.any() for copy in again)
    (other,) = staging.copy(snapshot_of({"other": torch.ones(7)})).tensors["weights"].values()
    assert other.rows.equal(torch.ones(7))


def copy_mixed(world: World) -> None:
    """With weights in host memory and a loss on the device, the first tensor of a snapshot is not on the device."""
    tensors = {"on the host": torch.ones(5), "on the device": torch.full((3,), 2.0, device=world.device)}
    for order in (list(tensors), list(tensors)[::-1]):
        staging = Staging()
        snapshot = snapshot_of({name: tensors[name] for name in order})
        staging.reserve(snapshot)
        with host_reads() as reads:
            copied = staging.copy(snapshot).tensors["weights"]
            assert not reads  # pinned, so the copy is asynchronous
            staging.wait()
            assert reads.total() == 1  # for the copy from the device
        assert copied["on the device"].rows.tolist() == [2.0] * 3
        assert copied["on the host"].rows.tolist() == [1.0] * 5
        assert copied["on the device"].rows.is_pinned()
        assert not copied["on the host"].rows.is_pinned()


def test_a_copy_waits_for_the_device_whatever_the_first_tensor_is(cuda_ranks):
    cuda_ranks(1, copy_mixed)


def save_from_the_device(world: World, root: Path, cpu_offload: bool) -> None:
    """Memory is allocated before the first save, which then waits for nothing; the checkpoint is what was saved."""
    live = Live(world, parallel(cpu_offload=cpu_offload), odd=False)
    with open_checkpoints(root, world) as checkpoints:
        checkpoints.prepare_asynchronous(live.trained, live.optimizer)
        before = live.local_values()
        checkpoints.save(live.trained, live.optimizer, state_of(1))
        checkpoints.wait_for_staging()
        with torch.no_grad():
            for parameter in live.parameters:
                parameter.mul_(2.0)
        assert live.local_values() != before
        checkpoints.wait()
        checkpoints.resume(open_checkpoint(step_path(root, 1)), live.trained, live.optimizer)
        assert live.local_values() == before


def test_asynchronous_saves_from_a_device(cuda_ranks, tmp_path):
    for cpu_offload in (False, True):
        cuda_ranks(2, save_from_the_device, tmp_path / str(cpu_offload), cpu_offload)


def save_at_the_end(world: World, root: Path) -> None:
    live = Live(world, parallel(), odd=False)

    def refuse(*_: object) -> None:
        raise AssertionError("no save delays training, so none needs a copy")

    reserve, Staging.reserve = Staging.reserve, refuse
    try:
        with open_checkpoints(root, world, every_minutes=0.0) as checkpoints:
            checkpoints.prepare_asynchronous(live.trained, live.optimizer)
            checkpoints.save(live.trained, live.optimizer, state_of(1))
            assert open_checkpoint(step_path(root, 1)).step == 1  # written when `save` returns
    finally:
        Staging.reserve = reserve


def test_a_run_that_saves_at_its_end_has_no_copies(cuda_ranks, tmp_path):
    cuda_ranks(2, save_at_the_end, tmp_path)
