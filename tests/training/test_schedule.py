"""The learning rate of every step: closed forms, lengths, floors, and schedules that change on resume."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from embedtrain.config.compose import to_plain
from embedtrain.config.optim import DecayShape, OptimConfig, ScheduleKind
from embedtrain.config.recipe import Recipe, TrainConfig
from embedtrain.errors import ConfigError
from embedtrain.training.optimizer import Schedule
from embedtrain.training.schedule import LearningRate, require_rates, schedule_change, schedule_warnings

# Peak, warm-up W, steps T and decay D of the table.
PEAK, W, T, D = 4.0, 4, 20, 6


def rates(kind: str, warmup: float = W, total: int = T, peak: float = PEAK, **options: Any) -> LearningRate:
    return LearningRate(OptimConfig(lr=peak, schedule=ScheduleKind(kind), warmup=warmup, **options), total)


def wsd(shape: str, **options: Any) -> LearningRate:
    return rates("wsd", decay=D, decay_shape=DecayShape(shape), **options)


# The decay is over u = (s - W) / (T - W) of the steps s, of wsd over u = (s - (T - D)) / D.
LAST, LAST_OF_WSD = (T - 1 - W) / (T - W), (D - 1) / D
CLOSED_FORMS = [
    ("linear", rates("linear"), [1, 1, 1 - 10 / 16, 1 - LAST]),
    ("cosine", rates("cosine"), [1, 1, (1 + math.cos(math.pi * 10 / 16)) / 2, (1 + math.cos(math.pi * LAST)) / 2]),
    ("sqrt", rates("sqrt"), [1, 1, 1 - math.sqrt(10 / 16), 1 - math.sqrt(LAST)]),
    ("polynomial", rates("polynomial", power=3.0), [1, 1, (1 - 10 / 16) ** 3, (1 - LAST) ** 3]),
    ("inverse_sqrt", rates("inverse_sqrt"), [1, math.sqrt(W / (W + 1)), math.sqrt(4 / 15), math.sqrt(4 / 20)]),
    ("constant", rates("constant"), [1, 1, 1, 1]),
    ("wsd-linear", wsd("linear"), [1, 1, 1, 1 - LAST_OF_WSD]),
    ("wsd-cosine", wsd("cosine"), [1, 1, 1, (1 + math.cos(math.pi * LAST_OF_WSD)) / 2]),
    ("wsd-sqrt", wsd("sqrt"), [1, 1, 1, 1 - math.sqrt(LAST_OF_WSD)]),
    ("floor", rates("linear", min_lr_ratio=0.1), [1, 1, 0.1 + 0.9 * (1 - 10 / 16), 0.1 + 0.9 * (1 - LAST)]),
    ("wsd-floor", wsd("linear", min_lr_ratio=0.25), [1, 1, 1, 0.25 + 0.75 * (1 - LAST_OF_WSD)]),
    ("inverse-floor", rates("inverse_sqrt", min_lr_ratio=0.5), [1, math.sqrt(W / (W + 1)), math.sqrt(4 / 15), 0.5]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "factors"), [case[1:] for case in CLOSED_FORMS], ids=[name for name, *_ in CLOSED_FORMS]
)
def test_closed_forms(rate: LearningRate, factors: list[float]):
    assert [rate(step) for step in range(W)] == pytest.approx([PEAK * (step + 1) / W for step in range(W)])
    assert [rate(step) for step in (W - 1, W, T - D, T - 1)] == pytest.approx([PEAK * factor for factor in factors])
    falling = [rate(step) for step in range(W - 1, T + 5)]
    assert falling == sorted(falling, reverse=True) and min(falling[: T - W + 1]) > 0


def test_lengths():
    """Fractions of all steps, steps beyond the end, and schedules that are longer or shorter than the run."""
    assert rates("linear", 0.0, 4)(0) == rates("linear", 0.05, 10)(0) == PEAK  # half a step of warm-up counts as none
    assert rates("linear", 0.2, 10)(0) == PEAK / 2
    assert rates("linear")(T) == rates("cosine")(2 * T) == wsd("sqrt")(T) == 0.0
    assert all(rates("linear", 8, 5)(step) > 0 for step in range(5))  # warm-up longer than the run
    assert [rates("wsd", decay=0.3)(step) for step in range(T)] == [wsd("linear")(step) for step in range(T)]
    longer = rates("cosine", 0.2, 10, schedule_steps=T)
    assert [longer(step) for step in range(10)] == [rates("cosine")(step) for step in range(10)]
    # A stable phase does not depend on the end of the run.
    assert [wsd("linear")(step) for step in range(T - D)] == [rates("wsd", decay=D, total=90)(s) for s in range(T - D)]


def test_a_schedule_that_leaves_steps_without_learning_is_rejected():
    optim = OptimConfig(schedule_steps=10)
    require_rates(optim, 10)
    require_rates(replace(optim, min_lr_ratio=0.1), 12)
    with pytest.raises(ConfigError, match=r"optim\.schedule_steps=10: .* 12 steps"):
        require_rates(optim, 12)


@pytest.mark.parametrize(
    ("options", "steps", "numbers"),
    [
        ({"warmup": 500}, 3, "500 steps and the run has 3 steps.*optim.warmup=0.05"),
        ({"warmup": 5}, 10, "5 steps and the run has 10 steps.*optim.warmup=0.05"),
        ({"warmup": 0.5}, 10, "5 steps.*optim.warmup=0.05"),
        ({"warmup": 2, "decay": 9, "schedule": ScheduleKind.wsd}, 10, "optim.decay=9 .* 8 steps"),
    ],
    ids=["more", "half", "fraction", "decay"],
)
def test_warmup_and_decay_that_take_too_many_steps_cause_a_warning(options: dict[str, Any], steps: int, numbers: str):
    (warning,) = schedule_warnings(OptimConfig(**options), steps)
    assert re.search(numbers, warning)


@pytest.mark.parametrize(("warmup", "steps"), [(500, 1001), (0.05, 3), (0, 1), (1, 2), (0.49, 100)])
def test_shorter_ones_cause_none(warmup: float, steps: int):
    assert schedule_warnings(OptimConfig(warmup=warmup), steps) == []
    assert schedule_warnings(OptimConfig(warmup=warmup, schedule=ScheduleKind.wsd), steps) == []


def test_every_group_gets_the_learning_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 3.0})
    both = Schedule(optimizer, OptimConfig(lr=1.0, warmup=0), 4)
    assert both.apply(2) == pytest.approx(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_changed_schedule_is_reported_on_resume():
    """With what the past steps had and would have; a longer run changes the past of most schedules."""

    def note(done: int, change: Callable[[Recipe], None], **optim: Any) -> str | None:
        before = Recipe(train=TrainConfig(steps=100), optim=OptimConfig(lr=1.0, warmup=10, **optim))
        after = Recipe(train=replace(before.train), optim=replace(before.optim))
        change(after)
        return schedule_change(to_plain(before), after, done, lambda recipe: recipe.train.steps or 0)

    def longer(recipe: Recipe) -> None:
        recipe.train.steps = 190

    def lower(recipe: Recipe) -> None:
        recipe.optim.lr = 0.5

    message = note(55, longer)
    assert message is not None
    assert all(part in message for part in ("from step 12 on", "step 55 had 0.511", "have 0.756", "step 56 has 0.75;"))
    assert note(10, longer) is None  # only warm-up is done
    assert note(60, longer, schedule=ScheduleKind.constant) is None
    assert note(90, longer, schedule=ScheduleKind.wsd, decay=9) is None
    assert "from step 93 on" in str(note(95, longer, schedule=ScheduleKind.wsd, decay=9))
    assert "from step 1 on" in str(note(5, lower))
