"""The chosen layout and its reason: what fits, what is fastest, what is requested, what to change if nothing fits."""

from dataclasses import replace

import pytest
from torch import nn

from embedtrain.commands.plan.compute import changes, largest_chunk
from embedtrain.config.optim import OptimConfig, StateDtype
from embedtrain.config.recipe import SELECTIVE, CheckpointConfig, GradientReduction, ParallelConfig, Precision, Strategy
from embedtrain.errors import ConfigError, ModelError
from embedtrain.planning.memory import ClusterSpec, StepWorkload
from embedtrain.planning.model_costs import model_spec
from embedtrain.planning.strategy import choose_encoding_layout, choose_layout, layout_candidates
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, built, spec_of
from tests.small import small_model

GIB = 2**30
TINY = spec_of(small_model("xlm-roberta").config, length=48)
LARGE, LLAMA = spec_of(XLMR_LARGE), spec_of(LLAMA_3_8B)
LLAMA_1B = spec_of(LLAMA_3_8B, hidden_size=2048, num_hidden_layers=16, intermediate_size=8192)
# Four billion weights in the shape of Qwen3: too many for fp32 moments beside them on a GPU of 80 GB.
QWEN3_4B = spec_of(
    {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36, "head_dim": 128,
     "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9728, "tie_word_embeddings": True}
)  # fmt: skip
# Half a billion weights in the shape of Qwen1.5, for which FSDP on one node is popular but not needed.
HALF = spec_of(LLAMA_3_8B, vocab_size=151936, hidden_size=1024, num_hidden_layers=24, intermediate_size=2816,
             num_attention_heads=16, num_key_value_heads=16)  # fmt: skip


def cluster_of(ranks: int = 8, memory: float = 80, per_node: int = 8, **more) -> ClusterSpec:
    return ClusterSpec(ranks=ranks, per_node=min(ranks, per_node), memory=int(memory * GIB), **more)


def work_of(ranks: int = 8, **more) -> StepWorkload:
    return StepWorkload(**{"rows": 32 * ranks, "tokens_per_text": 512, **more})


def choice_for(model=LARGE, ranks: int = 8, memory: float = 80, *, more_work=None, **options):
    parallel = ParallelConfig(**{"strategy": Strategy.auto, **options})
    return choose_layout(
        parallel, cluster_of(ranks, memory), model, work_of(ranks, **(more_work or {})), always_measure=True
    )


def test_a_model_that_fits_is_replicated():
    best = choice_for()
    assert (best.layout.strategy, best.layout.replicate, best.layout.shard) == (Strategy.ddp, 8, 1)
    assert not best.layout.activation_checkpointing
    assert not best.layout.cpu_offload
    assert "fits on every rank: 2" in best.layout.reason
    assert "of 80.0 GiB per rank; an estimated " in best.layout.reason
    assert "fsdp, not resharded after forward" in best.layout.reason
    assert "\n" not in best.layout.reason


def test_sharding_is_chosen_if_replication_fits_but_waits_for_communication():
    """Llama-3.2-1B with 128 rows on 64 GPUs: each rank encodes four texts, too few to hide an all-reduce of fp32."""
    small_batch = {"rows": 128, "chunk_tokens": 16384}
    sharded = choice_for(LLAMA_1B, ranks=64, more_work=small_batch)
    replicated = choice_for(LLAMA_1B, ranks=64, more_work=small_batch, strategy=Strategy.ddp).best
    assert replicated.fits
    assert sharded.layout.strategy is Strategy.fsdp
    assert sharded.best.traffic.bytes < 0.8 * replicated.traffic.bytes
    assert sharded.best.traffic.seconds < 0.8 * replicated.traffic.seconds
    assert sharded.layout.reason.startswith("faster than ddp, which fits too: an estimated ")
    for seconds in (sharded.best.traffic.seconds, replicated.traffic.seconds):
        assert f"{1000 * seconds:.1f} ms" in sharded.layout.reason


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 64])
def test_half_a_billion_weights_are_replicated_on_any_number_of_ranks(ranks):
    """The layouts take nearly the same time, so the simplest is chosen; the reason shows both times."""
    best = choice_for(HALF, ranks=ranks, more_work={"rows": 512, "chunk_tokens": 16384})
    assert best.layout.strategy is Strategy.ddp
    assert ("fsdp" in best.layout.reason or "hsdp" in best.layout.reason) == (ranks > 1)


def test_a_small_model_is_not_sharded_to_save_less_than_a_millisecond():
    """A step of the small model takes microseconds on 64 ranks, half of them communication."""
    best = choice_for(TINY, ranks=64)
    fastest = min(c.traffic.seconds for c in layout_candidates(ParallelConfig(), cluster_of(64), TINY, work_of(64)))
    assert best.layout.strategy is Strategy.ddp
    assert best.best.traffic.seconds > 1.03 * fastest
    assert best.layout.reason.endswith(", but ddp is simpler")


def test_ranks_without_a_gpu_are_not_planned_with_the_rates_of_one():
    """Eight short texts: a GPU spends the step on communication, a CPU on computation that hides it."""
    short = StepWorkload(rows=8, tokens_per_text=32)
    clusters = [ClusterSpec.of_ranks(2, 2, 64 * GIB, gpu=gpu) for gpu in (True, False)]
    choices = [choose_layout(ParallelConfig(), cluster, HALF, short, always_measure=True) for cluster in clusters]
    assert [choice.layout.strategy for choice in choices] == [Strategy.fsdp, Strategy.ddp]


def test_a_larger_model_is_sharded_within_nodes_then_over_nodes():
    assert choice_for(LLAMA, ranks=8).layout.strategy is Strategy.fsdp
    within = choice_for(LLAMA, ranks=64).layout
    assert (within.strategy, within.replicate, within.shard) == (Strategy.hsdp, 8, 8)
    over = choice_for(LLAMA, ranks=64, memory=16, more_work={"chunk_tokens": 4096}).layout
    assert (over.strategy, over.shard) == (Strategy.fsdp, 64)
    assert "ddp would need" in over.reason


def test_memory_is_saved_only_as_far_as_needed():
    """With less memory: resharding first, then selective activation checkpointing, all of it, CPU offload last."""
    small = {"chunk_tokens": 1024}
    selected = [choice_for(LLAMA, memory=memory, more_work=small).layout for memory in (160, 60, 26, 12)]
    assert [(c.strategy, c.reshard_after_forward, c.cpu_offload) for c in selected[1:]] == [
        (Strategy.fsdp, False, False),
        (Strategy.fsdp, True, False),
        (Strategy.fsdp, True, True),
    ]
    assert selected[0].strategy is Strategy.ddp
    many = [choice_for(LARGE, memory=memory, more_work={"chunk_tokens": 65536}).layout for memory in (80, 28, 16)]
    assert [c.activation_checkpointing for c in many] == [False, SELECTIVE, True]


def test_the_fastest_layout_that_fits_is_chosen():
    for ranks, memory in ((8, 80), (64, 80), (64, 40), (512, 24)):
        given = cluster_of(ranks, memory), LLAMA, work_of(ranks, chunk_tokens=4096)
        best = choose_layout(ParallelConfig(), *given, always_measure=True).best
        fitting = [c for c in layout_candidates(ParallelConfig(), *given) if c.fits]
        assert best.fits
        assert best.traffic.seconds <= 1.03 * min(c.traffic.seconds for c in fitting)


def test_the_choice_is_deterministic_and_the_next_best_differs():
    first, second = choice_for(LLAMA, ranks=64), choice_for(LLAMA, ranks=64)
    assert first == second
    assert first.next_best is not None
    assert first.next_best.name != first.best.name


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"strategy": Strategy.ddp}, (8, 1)),
        ({"strategy": Strategy.fsdp}, (1, 8)),
        ({"strategy": Strategy.hsdp}, (1, 8)),
        ({"strategy": Strategy.hsdp, "shard_size": 2}, (4, 2)),
    ],
)
def test_requested_options_are_obeyed(options, shape):
    layout = choice_for(TINY, **options).layout
    assert (layout.replicate, layout.shard) == shape
    assert layout.strategy is options["strategy"]
    assert layout.reason.startswith("requested: ")
    for name in ("reshard_after_forward", "activation_checkpointing", "cpu_offload"):
        for value in (False, True):
            assert getattr(choice_for(TINY, **options, **{name: value}).layout, name) is value
    selective = choice_for(TINY, **options, activation_checkpointing=SELECTIVE)
    assert selective.layout.activation_checkpointing == SELECTIVE
    assert selective.best.name.endswith("selective activation checkpointing")


def test_advice_against_fsdp_for_a_small_model_on_one_node():
    selected = choice_for(HALF, strategy=Strategy.fsdp)
    assert selected.layout.strategy is Strategy.fsdp
    assert "; parallel.strategy=ddp fits too, with " in selected.layout.reason
    ddp = choice_for(HALF, strategy=Strategy.ddp).best
    assert f"{1000 * ddp.traffic.seconds:.1f} ms per step instead of " in selected.layout.reason
    assert "fits too" not in choice_for(LLAMA, strategy=Strategy.fsdp).layout.reason
    assert "fits too" not in choice_for(TINY, strategy=Strategy.fsdp).layout.reason


@pytest.mark.parametrize("shard_size", [0, -1, 3, 16])
def test_a_shard_size_that_does_not_divide_the_ranks_is_rejected(shard_size):
    with pytest.raises(ConfigError, match=rf"parallel\.shard_size={shard_size} .* 1, 2, 4, 8"):
        choice_for(TINY, strategy=Strategy.hsdp, shard_size=shard_size)


@pytest.mark.parametrize("strategy", [Strategy.auto, Strategy.ddp, Strategy.fsdp])
def test_a_shard_size_without_hsdp_is_rejected(strategy):
    with pytest.raises(ConfigError, match=r"parallel\.shard_size=2 .*hsdp"):
        choice_for(TINY, strategy=strategy, shard_size=2)


def test_nodes_of_unequal_size():
    """4 ranks per node and 6 ranks in total: hsdp is rejected, auto does not consider it."""
    six = cluster_of(6, per_node=4)
    with pytest.raises(ConfigError, match="1, 2, 3, 6"):
        choose_layout(ParallelConfig(strategy=Strategy.hsdp), six, TINY, work_of(6))
    strategies = {c.layout.strategy for c in layout_candidates(ParallelConfig(), six, TINY, work_of(6))}
    assert strategies == {Strategy.ddp, Strategy.fsdp}


def test_activations_of_a_small_model_are_not_measured():
    def fail(recompute):
        raise AssertionError(recompute)

    selected = choose_layout(ParallelConfig(), cluster_of(2, 8, gpu=False), replace(TINY, activations=fail), work_of(2))
    assert selected.layout.strategy is Strategy.ddp
    assert "at most" in selected.layout.reason


def test_cpu_offload_is_not_considered_on_cpus():
    on_cpu = layout_candidates(ParallelConfig(), cluster_of(gpu=False), TINY, work_of())
    assert not any(c.layout.cpu_offload for c in on_cpu)
    assert any(c.layout.cpu_offload for c in layout_candidates(ParallelConfig(), cluster_of(), TINY, work_of()))


ONE_GPU = {"ranks": 1, "per_node": 1, "memory": 80 * GIB}


def test_cpu_offload_is_the_last_remedy_and_needs_host_memory():
    """Four billion weights on one GPU: bf16 moments are advised before offload, which a small host does not have."""
    job = work_of(rows=256)
    large = choose_layout(ParallelConfig(), ClusterSpec(**ONE_GPU, host_memory=512 * GIB), QWEN3_4B, job)
    assert large.layout.cpu_offload
    assert "GiB of host memory per node" in large.layout.reason
    advice = "optim.state_dtype=bf16 optim.betas=[0.9,0.99] would fit without CPU offload: ddp"
    assert advice in large.layout.reason
    small = choose_layout(ParallelConfig(), ClusterSpec(**ONE_GPU, host_memory=128 * GIB), QWEN3_4B, job)
    assert not small.best.fits
    assert "optim.state_dtype=bf16 optim.betas=[0.9,0.99] would fit: ddp" in small.layout.reason
    smaller = replace(job, optim=OptimConfig(state_dtype=StateDtype.bf16, betas=[0.9, 0.99]))
    taken = choose_layout(ParallelConfig(), ClusterSpec(**ONE_GPU, host_memory=128 * GIB), QWEN3_4B, smaller)
    assert taken.best.fits
    assert not taken.layout.cpu_offload
    assert "state_dtype" not in taken.layout.reason
    # 16 bytes a weight are too many for 60 GiB, 10 are not.
    tight = ClusterSpec(**ONE_GPU | {"memory": 60 * GIB}, host_memory=512 * GIB)
    for optim in (job.optim, smaller.optim):
        chosen = choose_layout(ParallelConfig(), tight, QWEN3_4B, replace(job, optim=optim))
        assert "; optim.state_dtype=int8 would fit without CPU offload: ddp" in chosen.layout.reason


def test_offload_is_not_chosen_for_its_estimated_time():
    """Chunks are encoded twice unless their graphs fit, for which offload would leave memory."""
    job = work_of(rows=2048, chunk_tokens=16384)
    given = cluster_of(1, 28), LLAMA_1B, job
    best = choose_layout(ParallelConfig(), *given, always_measure=True).best
    fastest = min(
        (of for of in layout_candidates(ParallelConfig(), *given) if of.fits), key=lambda of: of.traffic.seconds
    )
    assert fastest.layout.cpu_offload
    assert best.fits
    assert not best.layout.cpu_offload


def test_a_requested_offload_that_a_host_cannot_hold_is_marked():
    job, parallel = work_of(rows=256), ParallelConfig(strategy=Strategy.ddp, cpu_offload=True)
    tight = ClusterSpec(**ONE_GPU, host_memory=110 * GIB)
    choice = choose_layout(parallel, tight, QWEN3_4B, job, always_measure=True)
    assert not choice.best.fits
    assert choice.best.memory.total < tight.usable
    assert "99.0 GiB are usable: the system would end a rank without a message" in choice.layout.reason
    sentences = changes(parallel, tight, QWEN3_4B, job, choice.best)
    assert any(line.startswith("checkpoint.asynchronous=false: ") for line in sentences)
    in_place = replace(job, checkpoint=CheckpointConfig(asynchronous=False))
    assert choose_layout(parallel, tight, QWEN3_4B, in_place).best.fits


def test_encoding_replicates_weights_below_half_of_the_memory():
    small, large = (choose_encoding_layout(ParallelConfig(), cluster_of(memory=memory), LLAMA) for memory in (120, 60))
    assert (small.layout.strategy, large.layout.strategy) == (Strategy.ddp, Strategy.fsdp)
    assert "fits on every rank: 41.9 GiB of weights, 120.0 GiB of memory" in small.layout.reason
    asked = choose_encoding_layout(ParallelConfig(strategy=Strategy.fsdp), cluster_of(memory=80), LLAMA)
    assert asked.layout.strategy is Strategy.fsdp


def test_changes_if_nothing_fits():
    tight, job = cluster_of(8, 16), work_of(chunk_tokens=8192)
    parallel = ParallelConfig(strategy=Strategy.fsdp, cpu_offload=False, activation_checkpointing=False)
    best = choose_layout(parallel, tight, LLAMA, job, always_measure=True).best
    assert not best.fits
    assert "requested: " in best.layout.reason
    assert "14.4 GiB are usable" in best.layout.reason
    sentences = changes(parallel, tight, LLAMA, job, best)
    assert any(line.startswith("leave parallel.* unset: ") for line in sentences)
    assert any(line.startswith("gpus=") for line in sentences)
    assert any(line.startswith("model.lora.rank=") for line in sentences)
    ranks = int(next(line for line in sentences if line.startswith("gpus=")).removeprefix("gpus=").partition(":")[0])
    assert any(c.fits for c in layout_candidates(parallel, cluster_of(ranks, 16), LLAMA, job))
    assert not any(c.fits for c in layout_candidates(parallel, cluster_of(ranks // 2, 16), LLAMA, job))
    # With automatic options it fits, so there is nothing to change.
    assert changes(ParallelConfig(), cluster_of(), LLAMA, job, choice_for(LLAMA).best) == []


def test_one_text_more_than_the_largest_chunk_does_not_fit():
    given, job = cluster_of(memory=40), work_of(rows=8 * 512)
    best = choose_layout(ParallelConfig(strategy=Strategy.ddp), given, LARGE, job, always_measure=True).best
    options = {"activation_checkpointing": False, "cpu_offload": False}
    selected = largest_chunk(LARGE, best.layout, given, job, reduce_per_step=best.reduce_per_step)
    assert selected is not None
    assert selected % job.tokens_per_text == 0

    def fits(chunk_tokens):
        tried = replace(job, chunk_tokens=chunk_tokens)
        (candidate,) = layout_candidates(ParallelConfig(strategy=Strategy.ddp, **options), given, LARGE, tried)
        return candidate.fits

    assert fits(selected)
    assert not fits(selected + job.tokens_per_text)
    assert largest_chunk(LARGE, best.layout, cluster_of(memory=1), job, reduce_per_step=True) is None


@pytest.mark.parametrize(
    ("model", "option", "per_step"),
    [
        (LARGE, GradientReduction.per_chunk, False),
        (LARGE, GradientReduction.per_step, True),
        (LARGE, GradientReduction.auto, True),
        (LLAMA, GradientReduction.auto, False),
    ],
)
def test_gradient_reduction_of_the_recipe_is_obeyed(model, option, per_step):
    choice = choice_for(model, strategy=Strategy.fsdp, gradient_reduction=option)
    assert choice.reduce_per_step is per_step


class _InPlace(nn.Linear):
    def forward(self, hidden):
        result = super().forward(hidden)
        result *= 0.5
        return result


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_change_a_product_in_place(bias):
    """Selective recomputation would change it twice: it is not chosen, and rejected where it is asked for."""
    encoder, blocks = built(small_model("xlm-roberta").config)
    for block in blocks:
        block.attention.self.query = _InPlace(32, 32, bias=bias, device="meta")
    model = model_spec(encoder, blocks, precision=Precision.fp32, tokens_per_text=48, gpu=True)
    found = {candidate.layout.activation_checkpointing for candidate in candidates_of(model)}
    assert found == {False, True}
    assert {candidate.layout.activation_checkpointing for candidate in candidates_of(TINY)} == {False, SELECTIVE, True}
    with pytest.raises(ModelError, match=r"selective is impossible with XLMRoberta.* in place"):
        choice_for(model, activation_checkpointing=SELECTIVE)


def candidates_of(model):
    return layout_candidates(ParallelConfig(strategy=Strategy.auto), cluster_of(), model, work_of())
