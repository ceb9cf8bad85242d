"""Options of `python -m embedtrain merge`."""

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embedtrain.config.checks import check_export, check_sets
from embedtrain.config.command_options import (
    BaseOptions,
    ChunkOptions,
    KindOptions,
    PoolingOptions,
    PrecisionOptions,
    RankOptions,
    SetOptions,
    UploadOptions,
    WrittenModelOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.kinds import load_kind
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sets
from embedtrain.config.recipe import ADAPTER, LOGIT_SCORE, ExportConfig, WeightsOf
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

HELP = f"""embedtrain merge: one model of the weights of several

  embedtrain merge models=[DIR,...] output_dir=DIR [option=value ...]
  embedtrain merge run=runs/NAME steps=last-5 output_dir=DIR
  torchrun --nproc-per-node 8 -m embedtrain merge models=[DIR,...] ...

DIR: a model directory, a run, a checkpoint of a run, a LoRA adapter, a Hub id.

{{options: models run steps output_dir! method weights t find.method find.sets dtype check}}

{LAUNCH_HELP}"""

_LAST, _BEST = re.compile(r"last-([1-9]\d*)"), re.compile(r"best-([1-9]\d*)")


class MergeMethod(str, Enum):
    """How weights are combined.

    `linear`: the weighted mean. `slerp`: along the great circle between the directions of two models.
    `task_arithmetic`: the base, and the weighted mean of the models' differences from it, times `scale`. `ties`: the
    same with the largest differences of each model, where signs agree.
    """

    linear = "linear"
    slerp = "slerp"
    task_arithmetic = "task_arithmetic"
    ties = "ties"


class LoraMerge(str, Enum):
    """What is combined of LoRA adapters.

    `product`: the models with the adapters merged, because the product of two means is not the mean of the products.
    `factors`: the factors A and B themselves, an approximation for checkpoints of one run, which is what averaging the
    adapter's files does.
    """

    product = "product"
    factors = "factors"


class SlerpScope(str, Enum):
    """What has an angle: each tensor, or all weights of the model together."""

    tensor = "tensor"
    model = "model"


class SlerpOrder(str, Enum):
    """Slerp of more than two models: `chain` merges one after the other, `karcher` is their mean on the sphere."""

    chain = "chain"
    karcher = "karcher"


class SearchMethod(str, Enum):
    """How weights are chosen on evaluation sets.

    `greedy`: from the best model on, keep each that does not make the mean worse. `grid`: of two models, evenly spaced
    weights. `coordinate`: of several, one weight after the other. `cocktail`: a softmax of the models' metrics.
    """

    greedy = "greedy"
    grid = "grid"
    coordinate = "coordinate"
    cocktail = "cocktail"


@dataclass(frozen=True)
class PartWeights:
    """An element of the option `parts`."""

    names: str  # a pattern, or `embeddings` or `heads`
    weights: list[float]


@dataclass(kw_only=True)
class FindOptions(PrecisionOptions, ChunkOptions, SetOptions):
    """The options `find.*`: weights that are chosen on evaluation sets, with one model in memory."""

    method: SearchMethod | None = None  # null: `weights`, or equal ones
    # further sets, measured for each model and the merged one
    held_out: list[Any] = option(factory=list, is_input=True, items=EvaluationSet)
    metric: str | None = None  # of every set; default: the main one of each. Their mean over the sets decides
    # of `cocktail`; default: the standard deviation of the models' metrics
    temperature: float | None = option(None, above=0, hint="null takes the standard deviation of the metrics")
    steps: int = option(10, within=(2, 1000))  # intervals of the weights from 0 to 1, for `grid` and `coordinate`
    rounds: int = option(2, within=(1, 100))  # of `coordinate`: how often each weight is searched at most


@dataclass(kw_only=True)
class MergeOptions(RankOptions, UploadOptions, WrittenModelOptions, BaseOptions, PoolingOptions, KindOptions):
    """Options of `python -m embedtrain merge`."""

    # Model directories, output_dirs of runs (their model/, else their newest checkpoint), checkpoints/step-N of runs,
    # directories of LoRA adapters, and Hub ids, at a revision as ID@REVISION.
    models: list[str] = option(factory=list, is_input=True)
    run: str | None = option(None, is_input=True)  # output_dir of a run whose checkpoints are merged
    steps: Any = None  # of `run`: last-N, best-N, or a list of steps
    best_metric: str | None = None  # set/metric of steps=best-N; default: the run's checkpoint.best_metric
    weights_of: WeightsOf = WeightsOf.trained  # of checkpoints; an exported model is what it is
    lora: LoraMerge = LoraMerge.product

    method: MergeMethod = MergeMethod.linear
    weights: list[float] | None = None  # one of each model; default: equal ones
    normalize_weights: bool = True  # divide weights by their sum
    t: float | None = option(None, within=(0, 1))  # instead of weights, of two models: 0 is the first, 1 the second
    scope: SlerpScope = SlerpScope.tensor  # of slerp
    order: SlerpOrder = SlerpOrder.chain  # of slerp with more than two models
    scale: float = option(1.0, finite=True)  # of task_arithmetic and ties: the lambda of the papers
    # of ties: the fraction of each tensor's differences that is kept
    density: float = option(0.2, above=0, at_most=1)
    # Other weights for tensors whose name a pattern matches (a regular expression, searched), the first that does:
    # [{names: 'layer.[0-5].', weights: [0.8, 0.2]}]. `embeddings` and `heads` are those parts of any model.
    parts: list[Any] = field(default_factory=list)
    find: FindOptions = field(default_factory=FindOptions)

    # index of the model whose prompts, tokenizer files and maximal length are written
    settings_from: int = option(0, at_least=0, hint="it is an index of models")
    formats: list[str] = field(default_factory=lambda: ["sentence_transformers"])  # as export.formats
    max_file_size: str = option("5GB", in_result=False)  # as export.max_file_size

    @property
    def export(self) -> ExportConfig:
        """The options of the directory that is written."""
        return ExportConfig(
            formats=self.formats,
            dtype=self.dtype,
            max_file_size=self.max_file_size,
            check=self.check,
            push_to_hub=self.push_to_hub,
            private=self.private,
        )


def selected_steps(steps: Any) -> tuple[str, int] | list[int]:
    """The option `steps`: `("last" | "best", N)`, or a list of numbers."""
    if isinstance(steps, list):
        return [int(step) for step in steps]
    for name, pattern in (("last", _LAST), ("best", _BEST)):
        if isinstance(steps, str) and (match := pattern.fullmatch(steps)):
            return name, int(match[1])
    raise ConfigError(f"steps={written(steps)}: must be last-N, best-N, or a list of steps, such as [500,1000]")


def check_merge(options: MergeOptions) -> MergeOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    if options.kind is not None:
        load_kind(options.kind, "kind")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the merged model")
    check.require(
        bool(options.models) != bool(options.run),
        "models",
        "write either models=[DIR,...], or run=DIR and steps=last-5",
    )
    if options.run:
        check.require(options.steps is not None, "steps", "is missing; write last-5, best-3 or [500,1000]")
        steps = options.steps
        is_list = isinstance(steps, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in steps)
        check.require(not isinstance(steps, list) or (is_list and bool(steps)), "steps", "must be a list of numbers")
        selected_steps(steps)
    else:
        check.require(options.steps is None, "steps", "is of run=DIR; write run instead of models")
    check.require(options.best_metric is None or "/" in options.best_metric, "best_metric", "must be set/metric")
    _check_weights(options, check)
    _check_method(options, check)
    if options.lora is LoraMerge.factors:
        message = "is for method=linear, of checkpoints of one run; write lora=product"
        check.require(options.method is MergeMethod.linear, "lora", message)
    _check_find(options.find)
    unsupported = next((name for name in (ADAPTER, LOGIT_SCORE) if name in options.formats), None)
    check.require(unsupported is None, "formats", f"a merged model has no {unsupported}; leave it out")
    check_export(options.export)
    return options


def _check_weights(options: MergeOptions, check: OptionChecks) -> None:
    check.require(options.weights is None or options.t is None, "t", "and weights are both set; keep one")
    is_searched = options.find.method is not None
    given = "weights" if options.weights is not None else "t" if options.t is not None else None
    if given is not None:
        check.require(not is_searched, given, "has no effect with find.method, which chooses the weights; keep one")
    check.require(not (is_searched and options.parts), "parts", "has no effect with find.method; keep one")
    signed = options.method in (MergeMethod.linear, MergeMethod.task_arithmetic)
    given_weights = {f"parts[{index}].weights": part.weights for index, part in enumerate(options.parts)}
    if options.weights is not None:
        given_weights["weights"] = options.weights
    for name, weights in given_weights.items():
        if not all(math.isfinite(weight) and (signed or weight >= 0) for weight in weights):
            raise ConfigError(f"{name}={written(weights)}: must be finite{'' if signed else ' and at least 0'}")
        if options.normalize_weights and not math.fsum(weights) > 0:
            raise ConfigError(f"{name}={written(weights)}: must have a sum above 0, by which they are divided")


def _parse_parts(value: list[Any]) -> list[PartWeights]:
    """The option `parts`. Raises ConfigError for an element that is not a mapping of `names` and `weights`."""
    parts = []
    for index, element in enumerate(value):
        if not isinstance(element, dict) or set(element) != {"names", "weights"}:
            raise ConfigError(f"parts[{index}]={element!r}: must be a mapping {{names: PATTERN, weights: [...]}}")
        names, weights = element["names"], element["weights"]
        is_list = isinstance(weights, list) and bool(weights)
        if not is_list or not all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights):
            raise ConfigError(
                f"parts[{index}].weights={written(weights)}: must be a list of numbers, one of each model"
            )
        try:
            re.compile(str(names))
        except re.error as error:
            raise ConfigError(f"parts[{index}].names={names}: is no regular expression: {error}") from None
        parts.append(PartWeights(str(names), [float(weight) for weight in weights]))
    return parts


def _needs_base(method: MergeMethod) -> bool:
    return method in (MergeMethod.task_arithmetic, MergeMethod.ties)


def _check_use(options: MergeOptions) -> None:
    """Nothing is set that another method has."""
    method, default = options.method, MergeOptions()
    is_slerp, has_base = method is MergeMethod.slerp, _needs_base(method)
    for name, is_used, needed in (
        ("scope", is_slerp, "method=slerp"),
        ("order", is_slerp, "method=slerp"),
        ("scale", has_base, "method=task_arithmetic or ties"),
        ("density", method is MergeMethod.ties, "method=ties"),
        ("base", has_base, "method=task_arithmetic or ties"),
    ):
        has_effect = is_used or getattr(options, name) == getattr(default, name)
        OptionChecks(options).require(has_effect, name, f"has no effect without {needed}")


def _check_method(options: MergeOptions, check: OptionChecks) -> None:
    method = options.method
    is_slerp, has_base = method is MergeMethod.slerp, _needs_base(method)
    message = f"is missing; method={method.value} needs the model that the others were trained from"
    check.require(not has_base or bool(options.base), "base", message)
    if is_slerp:
        message = "slerp divides weights by their sum; leave it out"
        check.require(options.normalize_weights, "normalize_weights", message)
        check.require(
            not options.parts or options.scope is SlerpScope.tensor, "parts", "has no effect with scope=model"
        )


def _check_find(find: FindOptions) -> None:
    check = OptionChecks(find, "find.")
    if find.method is None:
        for name in ("sets", "held_out"):
            check.require(not getattr(find, name), name, "has no effect without find.method; write find.method=greedy")
        return
    check.require(bool(find.sets), "sets", f"is missing; find.method={find.method.value} needs evaluation sets")
    check_sets(find.sets, "find.sets")
    check_sets(find.held_out, "find.held_out")


def compose(arguments: list[str]) -> MergeOptions:
    """The options, checked."""
    options = compose_command("merge", MergeOptions, arguments, HELP, _check_use)
    options.parts = _parse_parts(options.parts)
    options.find.sets = parse_sets(options.find.sets, "find.sets")
    options.find.held_out = parse_sets(options.find.held_out, "find.held_out")
    return check_merge(options)
