"""Training steps on fake ranks under torch's FSDPMemTracker, and their plans: `python -m tests.planning.tracked`."""

import json

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import ParallelConfig, Precision, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.sharding import ParallelLayout, shard_encoder
from embedtrain.planning.memory import ClusterSpec, StepWorkload, step_memory
from embedtrain.planning.model_costs import model_spec
from embedtrain.training.optimizer import build_optimizer
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, built

RANKS, LENGTH = 8, 128
CPU = torch.device("cpu")
# Dropout on a CPU keeps more than on a GPU; without it both keep the same.
XLMR = XLMR_LARGE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Met(ParallelLayout):
    """A mesh cannot be made among fake tensors, so it is made before."""

    def mesh(self, device):
        return MESH


def compare(name, config, layers, texts, *, reshard_after_forward=True, recompute=False, precision=Precision.bf16):
    encoder, blocks = built(config, num_hidden_layers=layers)
    found = model_spec(encoder, blocks, precision=precision, tokens_per_text=LENGTH, gpu=False)
    layout = Met(
        Strategy.fsdp, 1, RANKS, "", reshard_after_forward=reshard_after_forward, activation_checkpointing=recompute
    )
    machines = ClusterSpec(ranks=RANKS, per_node=RANKS, memory=10**12, gpu=False)
    work = StepWorkload(rows=texts * RANKS // 2, tokens_per_text=LENGTH, chunk_tokens=texts * LENGTH)
    planned = step_memory(found, layout, machines, work, reduce_per_step=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shard_encoder(encoder, blocks, layout, ParallelConfig(strategy=Strategy.fsdp, precision=precision), CPU)
        optimizer = build_optimizer(encoder, OptimConfig())

        def step(texts, length):
            ids = torch.zeros(texts, length, dtype=torch.int64)
            encoder(Chunk(ids, torch.ones_like(ids)))[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        encoder.train()
        step(1, 8)  # else what DTensor makes once, of whole shapes, is counted as the optimiser's
        tracker = FSDPMemTracker(encoder, optimizer)
        tracker.track_inputs(())
        with tracker:
            step(texts, LENGTH)
            tracker.reset_mod_stats()
            step(texts, LENGTH)
        peak = tracker.get_tracker_snapshot("peak")[CPU]
    measured = {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}
    print(json.dumps({"name": name, "planned": {**planned.by_kind, "total": planned.total}, "tracked": measured}))


dist.init_process_group("fake", rank=0, world_size=RANKS)
MESH = ParallelLayout(Strategy.fsdp, 1, RANKS, "").mesh(CPU)
compare("XLM-R, 2 blocks", XLMR, 2, 8)
compare("XLM-R, 4 blocks", XLMR, 4, 8)
compare("XLM-R, 4 blocks, many tokens", XLMR, 4, 128)
compare("XLM-R, 4 blocks, many tokens, gathered once", XLMR, 4, 128, reshard_after_forward=False)
compare("XLM-R, 4 blocks, recomputed", XLMR, 4, 256, recompute=True)
compare("XLM-R, 4 blocks, many tokens, fp32", XLMR, 4, 128, precision=Precision.fp32)
compare("Llama, 2 blocks", LLAMA_3_8B, 2, 8)
compare("Llama, 4 blocks, many tokens", LLAMA_3_8B, 4, 128)
