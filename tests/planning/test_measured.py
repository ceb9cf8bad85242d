"""Planned memory compared with real training steps: new processes, real weights, Adam."""

import pytest

from benchmarks.plan import LLAMA, XLMR, Case, compare
from embedtrain.config.recipe import LoraConfig, ParallelConfig, Precision, Strategy


def within(case: Case) -> None:
    found = compare(case)
    print(case.name, found)
    assert found.planned == pytest.approx(found.measured, rel=0.15)
    assert found.measured > 2e8, "too little to tell a model from what else a process takes"


def options(strategy: Strategy, precision: Precision, **more: bool) -> ParallelConfig:
    return ParallelConfig(strategy=strategy, precision=precision, **more)


@pytest.mark.slow
def test_a_plan_is_what_a_step_takes():
    """56 million weights and one chunk of tokens."""
    parallel = options(Strategy.ddp, Precision.fp32)
    within(Case(name="XLM-R", config=XLMR, parallel=parallel, rows=4, chunk_tokens=512))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "parallel", "more"),
    [
        (XLMR, 1, options(Strategy.ddp, Precision.bf16), {"rows": 16}),
        (XLMR, 2, options(Strategy.ddp, Precision.fp32), {"rows": 16}),
        (XLMR, 2, options(Strategy.fsdp, Precision.fp32, reshard_after_forward=True), {"rows": 16}),
        (XLMR, 2, options(Strategy.fsdp, Precision.bf16, reshard_after_forward=True), {}),
        (XLMR, 2, options(Strategy.fsdp, Precision.fp32, reshard_after_forward=False), {}),
        (XLMR, 2, options(Strategy.fsdp, Precision.fp32, activation_checkpointing=True), {}),
        (LLAMA, 2, options(Strategy.fsdp, Precision.fp32, reshard_after_forward=True), {"rows": 16}),
        (LLAMA, 1, options(Strategy.ddp, Precision.bf16), {"lora": LoraConfig(rank=16)}),
    ],
)
def test_plans_of_other_layouts_are_too(config, ranks, parallel, more):
    within(Case(name=config["model_type"], config=config, parallel=parallel, ranks=ranks, **more))
