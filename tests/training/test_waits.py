"""Between a step's beginning and its end nothing is read from the device, so a GPU is never waited for."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import Precision, Strategy
from embedtrain.distributed.world import World, joined_world
from embedtrain.loading.load import load_model
from embedtrain.losses.batch_statistics import RowSpec
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.types import BatchInfo, Loss, LossOutput
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import batch, parallel, small_model, small_tokenizer

# A value of a tensor becomes one of Python's, or a size depends on values.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(READS):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Sum(Loss):
    """Reads nothing itself; the real ones count their candidates once a batch."""

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        return LossOutput(queries.sum() + documents.square().sum())


def reads(
    world: World, activation_tokens: int, loss: Loss, precision: Precision, measured: bool = False
) -> tuple[dict[str, int], int]:
    model = small_model("xlm-roberta", dropout=0.1)
    loaded = load_model(model, parallel(Strategy.fsdp, precision=precision), world, seed=0, tokenizer=small_tokenizer())
    backward = Backward(
        loaded.encoder, loss.to(world.device), world, seed=0, dummy=loaded.tokenizer.dummy(), row_specs=[RowSpec()]
    )
    made = make_rank_batch(batch(9), world.rank, world.size, loaded.tokenizer, ChunkOptions(40, activation_tokens))
    on_gpu = world.device.type == "cuda"
    made = (made.pinned() if on_gpu else made).to(world.device)
    with Reads() as seen:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            output, finite = backward(made, measured=measured)
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    assert finite
    assert ("uniformity" in output.metrics) == measured
    return dict(seen.counts), len(made.chunks)


@pytest.mark.parametrize(("activation_tokens", "measured"), [(0, False), (80, True), (10_000, False)])
def test_nothing_is_read_while_chunks_are_encoded(ranks, activation_tokens, measured):
    for found, chunks in ranks(2, reads, activation_tokens, Sum(), Precision.fp32, measured):
        assert chunks > 2
        assert not found


def test_a_real_loss_reads_as_much_however_many_chunks_there_are(ranks):
    counted = [ranks(2, reads, keep, InfoNCE(InfoNCEConfig()), Precision.fp32)[0][0] for keep in (0, 10_000)]
    assert counted[0] == counted[1]


@pytest.mark.gpu
def test_no_step_waits_for_a_gpu():
    """What torch itself calls a wait is an error meanwhile."""
    with joined_world() as world:
        assert world.device.type == "cuda"
        reads(world, 80, Sum(), Precision.bf16, measured=True)
