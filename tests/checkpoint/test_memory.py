"""Memory of saving and loading: no rank needs more than its shard and one tensor; measured with a 300 MB model."""

from pathlib import Path

import pytest

from embedtrain.checkpoint.snapshot import live_snapshot
from embedtrain.config.recipe import CheckpointLayout, Strategy
from embedtrain.distributed.world import World
from tests.checkpoint.live import Live, open_checkpoints, state_of, verified
from tests.memory import MB, memory_growth
from tests.small import parallel

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 2}
# The largest tensor of the model, and memory of blocks that are read and written and of Python; MB.
ONE_TENSOR, OVERHEAD = 17, 16


def measure(world: World, root: Path) -> dict[str, float]:
    """Size of this rank's shard of a checkpoint, and memory growth of this rank by operation; MB."""
    live = Live(world, parallel(Strategy.fsdp), odd=False, **SIZES)
    live.step()
    snapshot = live_snapshot(live.trained, live.optimizer)
    shard = sum(shard.rows.nbytes for shards in snapshot.tensors.values() for shard in shards.values())
    measured = {"shard": shard / MB}
    del snapshot
    for layout in CheckpointLayout:
        for asynchronous in (False, True):
            with open_checkpoints(root, world, layout=layout, asynchronous=asynchronous, keep=1) as checkpoints:
                grown: list[float] = []
                with memory_growth(grown):
                    checkpoints.save(live.trained, live.optimizer, state_of(1))
                    checkpoints.wait()
            measured[f"save {layout.value} {asynchronous}"] = grown[0]
        grown = []
        checkpoint = verified(root, 1)
        with memory_growth(grown):
            checkpoints.resume(checkpoint, live.trained, live.optimizer)
        measured[f"load {layout.value}"] = grown[0]
    return measured


@pytest.mark.slow
def test_no_rank_needs_more_than_its_shard_and_one_tensor(ranks, tmp_path):
    for measured in ranks(2, measure, tmp_path):
        shard = measured.pop("shard")
        assert shard > 4 * (ONE_TENSOR + OVERHEAD), "the model is too small to show anything"
        for operation, grown in measured.items():
            staged = shard if operation.endswith("True") else 0  # the copy of an asynchronous save
            assert grown <= staged + ONE_TENSOR + OVERHEAD, (operation, measured)
            assert grown >= 0.9 * staged, "the measurement misses the copy"
