"""Which layout is chosen, and why: what fits, what is fastest, what is asked for, what to change if nothing fits."""

from dataclasses import replace

import pytest

from embedtrain.config.recipe import GradientReduction, ParallelConfig, Strategy
from embedtrain.errors import ConfigError
from embedtrain.plan.compute import changes, largest_chunk
from embedtrain.planning.strategy import choose, choose_encoding_layout, layout_candidates
from embedtrain.planning.workload import ClusterSpec, StepWorkload
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, facts
from tests.small import small_model

GIB = 2**30
TINY = facts(small_model("xlm-roberta").config, length=48)
LARGE, LLAMA = facts(XLMR_LARGE), facts(LLAMA_3_8B)
# A model of half a billion weights in Qwen1.5's shape, which people put under FSDP on one node.
HALF = facts(LLAMA_3_8B, vocab_size=151936, hidden_size=1024, num_hidden_layers=24, intermediate_size=2816,
             num_attention_heads=16, num_key_value_heads=16)  # fmt: skip


def machines(ranks: int = 8, memory: float = 80, per_node: int = 8, **more) -> ClusterSpec:
    return ClusterSpec(ranks=ranks, per_node=min(ranks, per_node), memory=int(memory * GIB), **more)


def work(ranks: int = 8, **more) -> StepWorkload:
    return StepWorkload(**{"rows": 32 * ranks, "tokens_per_text": 512, **more})


def chosen(found=LARGE, ranks: int = 8, memory: float = 80, *, more_work=None, **options):
    parallel = ParallelConfig(**{"strategy": Strategy.auto, **options})
    return choose(parallel, machines(ranks, memory), found, work(ranks, **(more_work or {})), measured=True)


def test_what_fits_is_replicated_and_the_line_says_what_that_saves():
    best = chosen()
    assert (best.layout.strategy, best.layout.replicate, best.layout.shard) == (Strategy.ddp, 8, 1)
    assert not best.layout.activation_checkpointing
    assert not best.layout.cpu_offload
    assert "it fits on every rank: 2" in best.layout.reason
    assert "of 80.0 GiB a rank; fsdp would add 1.0 GB of all-gathers a step" in best.layout.reason
    assert "\n" not in best.layout.reason


def test_what_does_not_is_sharded_within_nodes_and_then_over_them():
    assert chosen(LLAMA, ranks=8).layout.strategy is Strategy.fsdp
    within = chosen(LLAMA, ranks=64).layout
    assert (within.strategy, within.replicate, within.shard) == (Strategy.hsdp, 8, 8)
    over = chosen(LLAMA, ranks=64, memory=16, more_work={"chunk_tokens": 4096}).layout
    assert (over.strategy, over.shard) == (Strategy.fsdp, 64)
    assert "ddp would take" in over.reason


def test_memory_is_saved_only_as_far_as_it_has_to_be():
    """The less memory, the more is given up: resharding first, recomputation, host memory last."""
    small = {"chunk_tokens": 1024}
    found = [chosen(LLAMA, memory=memory, more_work=small).layout for memory in (160, 60, 26, 12)]
    assert [(one.strategy, one.reshard_after_forward, one.cpu_offload) for one in found[1:]] == [
        (Strategy.fsdp, False, False),
        (Strategy.fsdp, True, False),
        (Strategy.fsdp, True, True),
    ]
    assert found[0].strategy is Strategy.ddp
    many = [chosen(LARGE, memory=memory, more_work={"chunk_tokens": 65536}).layout for memory in (80, 28)]
    assert [one.activation_checkpointing for one in many] == [False, True]


def test_of_what_fits_the_fastest_is_taken():
    for ranks, memory in ((8, 80), (64, 80), (64, 40), (512, 24)):
        given = machines(ranks, memory), LLAMA, work(ranks, chunk_tokens=4096)
        best = choose(ParallelConfig(), *given, measured=True).best
        fitting = [one for one in layout_candidates(ParallelConfig(), *given) if one.fits]
        assert best.fits
        assert best.traffic.step <= 1.03 * min(one.traffic.step for one in fitting)


def test_the_choice_is_the_same_each_time_and_the_next_best_another():
    first, second = chosen(LLAMA, ranks=64), chosen(LLAMA, ranks=64)
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
def test_what_is_asked_for_is_obeyed(options, shape):
    layout = chosen(TINY, **options).layout
    assert (layout.replicate, layout.shard) == shape
    assert layout.strategy is options["strategy"]
    assert layout.reason.startswith("asked for; ")
    for name in ("reshard_after_forward", "activation_checkpointing", "cpu_offload"):
        for value in (False, True):
            assert getattr(chosen(TINY, **options, **{name: value}).layout, name) is value


def test_fsdp_for_half_a_billion_weights_on_one_node_is_advised_against():
    found = chosen(HALF, strategy=Strategy.fsdp)
    assert found.layout.strategy is Strategy.fsdp
    assert "; parallel.strategy=ddp would do, with " in found.layout.reason
    assert "GB of all-gathers a step" in found.layout.reason
    assert "would do" not in chosen(LLAMA, strategy=Strategy.fsdp).layout.reason
    assert "would do" not in chosen(TINY, strategy=Strategy.fsdp).layout.reason


@pytest.mark.parametrize("shard_size", [0, -1, 3, 16])
def test_a_shard_size_that_does_not_divide(shard_size):
    with pytest.raises(ConfigError, match=rf"parallel\.shard_size={shard_size} .* 1, 2, 4, 8"):
        chosen(TINY, strategy=Strategy.hsdp, shard_size=shard_size)


@pytest.mark.parametrize("strategy", [Strategy.auto, Strategy.ddp, Strategy.fsdp])
def test_a_shard_size_without_hsdp(strategy):
    with pytest.raises(ConfigError, match=r"only for parallel\.strategy=hsdp"):
        chosen(TINY, strategy=strategy, shard_size=2)


def test_a_node_that_cannot_be_cut():
    """hsdp with 4 ranks a node but 6 ranks in all; auto leaves it out."""
    six = machines(6, per_node=4)
    with pytest.raises(ConfigError, match="1, 2, 3, 6"):
        choose(ParallelConfig(strategy=Strategy.hsdp), six, TINY, work(6))
    strategies = {one.layout.strategy for one in layout_candidates(ParallelConfig(), six, TINY, work(6))}
    assert strategies == {Strategy.ddp, Strategy.fsdp}


def test_a_small_model_is_chosen_for_without_a_look_at_its_code():
    def never(recompute):
        raise AssertionError(recompute)

    found = choose(ParallelConfig(), machines(2, 8, gpu=False), replace(TINY, keeps=never), work(2))
    assert found.layout.strategy is Strategy.ddp
    assert "at most" in found.layout.reason


def test_host_memory_is_no_choice_where_ranks_compute_on_it():
    on_cpu = layout_candidates(ParallelConfig(), machines(gpu=False), TINY, work())
    assert not any(one.layout.cpu_offload for one in on_cpu)
    assert any(one.layout.cpu_offload for one in layout_candidates(ParallelConfig(), machines(), TINY, work()))


def test_encoding_replicates_what_leaves_half_of_the_memory():
    small, large = (choose_encoding_layout(ParallelConfig(), machines(memory=memory), LLAMA) for memory in (120, 60))
    assert (small.layout.strategy, large.layout.strategy) == (Strategy.ddp, Strategy.fsdp)
    assert "it fits on every rank: 41.9 GiB of weights, 120.0 GiB of memory" in small.layout.reason
    asked = choose_encoding_layout(ParallelConfig(strategy=Strategy.fsdp), machines(memory=80), LLAMA)
    assert asked.layout.strategy is Strategy.fsdp


def test_nothing_fits_and_what_to_change():
    tight, job = machines(8, 16), work(chunk_tokens=8192)
    parallel = ParallelConfig(strategy=Strategy.fsdp, cpu_offload=False, activation_checkpointing=False)
    best = choose(parallel, tight, LLAMA, job, measured=True).best
    assert not best.fits
    assert "asked for; " in best.layout.reason
    assert "14.4 GiB may be planned with" in best.layout.reason
    told = changes(parallel, tight, LLAMA, job, best)
    assert any(line.startswith("leave parallel.* open: ") for line in told)
    assert any(line.startswith("gpus=") for line in told)
    assert any(line.startswith("model.lora.rank=") for line in told)
    ranks = int(next(line for line in told if line.startswith("gpus=")).removeprefix("gpus=").partition(":")[0])
    assert any(one.fits for one in layout_candidates(parallel, machines(ranks, 16), LLAMA, job))
    assert not any(one.fits for one in layout_candidates(parallel, machines(ranks // 2, 16), LLAMA, job))
    # With everything open something fits, so nothing need be changed.
    assert changes(ParallelConfig(), machines(), LLAMA, job, chosen(LLAMA).best) == []


def test_the_largest_chunk_fits_and_one_text_more_does_not():
    given, job = machines(memory=40), work(rows=8 * 512)
    best = choose(ParallelConfig(strategy=Strategy.ddp), given, LARGE, job, measured=True).best
    options = {"activation_checkpointing": False, "cpu_offload": False}
    found = largest_chunk(LARGE, best.layout, given, job, whole=best.whole)
    assert found is not None
    assert found % job.tokens_per_text == 0

    def fits(chunk_tokens):
        tried = replace(job, chunk_tokens=chunk_tokens)
        (one,) = layout_candidates(ParallelConfig(strategy=Strategy.ddp, **options), given, LARGE, tried)
        return one.fits

    assert fits(found)
    assert not fits(found + job.tokens_per_text)
    assert largest_chunk(LARGE, best.layout, machines(memory=1), job, whole=True) is None


def test_whole_gradients_as_the_recipe_says():
    assert chosen(LARGE, strategy=Strategy.fsdp, gradient_reduction=GradientReduction.per_chunk).whole is False
    assert chosen(LARGE, strategy=Strategy.fsdp, gradient_reduction=GradientReduction.per_step).whole is True
    assert chosen(LARGE, strategy=Strategy.fsdp).whole is True
    assert chosen(LLAMA, strategy=Strategy.fsdp).whole is False
