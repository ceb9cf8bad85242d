"""Checks of a recipe: values and combinations that cannot work, rejected before a model is loaded or a file is written.

Types and unknown names are rejected earlier, when the recipe is composed.
"""

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from embedtrain.config.code import is_code_path
from embedtrain.config.columns import parse_columns, parse_condition
from embedtrain.config.evaluation import (
    EvaluationConfig,
    EvaluationSet,
    SetKind,
    check_index,
    check_index_of_kind,
    check_kind_of_vectors,
    check_truncate_dims,
)
from embedtrain.config.kind_settings import SparsityConfig
from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import check_kind_loss, check_loss
from embedtrain.config.migration import metric_of_evaluator
from embedtrain.config.names import evaluator_sets
from embedtrain.config.optim import check_optim
from embedtrain.config.options import check_values
from embedtrain.config.recipe import (
    ADAPTER,
    ALL_LINEAR,
    EXPORT_FORMATS,
    LOGIT_SCORE,
    ONNX,
    ONNX_FP16,
    ONNX_INT8,
    OPENVINO,
    SELECTIVE,
    DataConfig,
    DataFormat,
    ExportConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    Recipe,
    Strategy,
    TrainConfig,
    TrainSource,
)
from embedtrain.config.source_losses import source_loss, source_requirements, uses_batches_by_source
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import install_command

# A trace holds every operator of its steps, in memory until they are over.
MAX_PROFILED_STEPS = 10
# Of wandb.init. Others choose its server, folder or code, which a recipe does not.
WANDB_ARGUMENTS = ("project", "entity", "group", "job_type", "name", "tags", "notes", "mode")
# What `tracking.NAME_init` may have, and an example of it.
_TRACKER_ARGUMENTS = {
    "wandb": (WANDB_ARGUMENTS, "{group: temperatures, tags: [zh]}"),
    "mlflow": (("experiment", "run_name", "tags"), "{experiment: temperatures, tags: {language: zh}}"),
    "trackio": (("project", "name", "group", "space_id", "dataset_id"), "{project: temperatures}"),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(KB|MB|GB|TB)")
# The types of rotary scaling, and whether transformers keeps the number of positions of the original model for each.
ROPE_TYPES = {"yarn": True, "linear": False, "llama3": True}
ROPE_TYPES_BY_BATCH = ("dynamic", "longrope")  # their frequencies follow the longest text of a forward pass
_ROPE_EXAMPLE = "such as model.rope_scaling={rope_type: yarn, factor: 4}"
_PROMPTS = ("query_prompt", "document_prompt", "instruction_format")


def check_recipe(recipe: Recipe) -> Recipe:
    """The recipe itself, if it can work; otherwise a ConfigError of the first check that fails."""
    if not recipe.name:
        names = "`embedtrain train --help` lists the names"
        raise ConfigError(f"no recipe: write recipe=NAME ({names}), or model.path=MODEL data.train=[FILE]")
    kind = load_kind(recipe.model.kind)
    # What an option is for comes before its limits.
    _check_parallel(recipe.parallel)
    if not kind.has_sparsity:
        _check_no_sparsity(recipe)
    check_loss(recipe.loss)
    check_values(recipe)
    check_model(recipe.model)
    _check_data(recipe.data)
    _check_train(recipe.train)
    check_optim(recipe.optim)
    _check_evaluation(recipe)
    _check_checkpoint(recipe)
    check_export(recipe.export, "export.")
    check_adapters(recipe.model, recipe.export.formats)
    kind.check_other_options(recipe)
    check_kind_loss(recipe.loss, kind)
    for index, source in enumerate(recipe.data.train):
        check_kind_loss(source_loss(source, recipe.loss), kind, f"data.train[{index}].loss")
    OptionChecks(recipe.export, "export.").require(
        kind.scores_pairs or LOGIT_SCORE not in recipe.export.formats,
        "formats",
        f"{LOGIT_SCORE} is for rerankers (model.kind=cross_encoder); leave it out",
    )
    OptionChecks(recipe.data, "data.").require(
        kind.scores_pairs or not recipe.data.batch_negatives,
        "batch_negatives",
        f"is for rerankers (model.kind=cross_encoder); loss=infonce compares each query of a {kind.name} model with "
        "all documents of the batch; leave it out",
    )
    for source in recipe.data.train:
        source_requirements(source, source_loss(source, recipe.loss), recipe)
    _check_tracking(recipe)
    uses_batches_by_source(recipe.data, [source_loss(source, recipe.loss) for source in recipe.data.train])
    return recipe


def check_model(model: ModelConfig) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    check = OptionChecks(model, "model.")
    if model.path is None and model.config is None and load_kind(model.kind).has_one_model:
        raise ConfigError("no model: set model.path to a Hub id or a directory, or model.config for random weights")
    if model.path is not None and model.config is not None:
        raise ConfigError("model.path and model.config are both set: the second has no weights; keep one")
    check.require(
        model.revision is None or model.path is not None,
        "revision",
        "chooses a version of a Hub repository; set model.path to its id",
    )
    check.require(
        model.tokenizer_revision is None or model.tokenizer is not None,
        "tokenizer_revision",
        "has no effect without model.tokenizer: the model's own tokenizer has the model's revision",
    )
    load_kind(model.kind).check_options(model)
    check.length("max_length")
    check.positive("rope_theta", "null keeps that of the configuration")
    if model.rope_scaling is not None:
        check_rope_scaling(model.rope_scaling)


def check_rope_scaling(scaling: Any) -> None:
    """Raise a ConfigError for a `model.rope_scaling` that no model can have."""
    if not isinstance(scaling, Mapping):
        raise ConfigError(
            f"model.rope_scaling={scaling!r}: must be a mapping with rope_type and factor, {_ROPE_EXAMPLE}"
        )
    rope_type = scaling.get("rope_type")
    if rope_type in ROPE_TYPES_BY_BATCH:
        raise ConfigError(
            f"model.rope_scaling.rope_type={rope_type}: scales positions by the longest text of a batch, so the "
            f"embedding of a text would depend on the other texts; write one of {', '.join(ROPE_TYPES)}"
        )
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"model.rope_scaling.rope_type={rope_type}: must be one of {', '.join(ROPE_TYPES)}, {_ROPE_EXAMPLE}"
        )
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 1):
        raise ConfigError(f"model.rope_scaling.factor={factor}: must be above 1, the factor of the context length")
    original = scaling.get("original_max_position_embeddings")
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        raise ConfigError(
            f"model.rope_scaling.original_max_position_embeddings={original}: must be a number; default: the model's"
        )


def check_adapters(model: ModelConfig, export_formats: Sequence[str]) -> None:
    """Raise a ConfigError for options of adapters that cannot work, also together with `export.formats`.

    The settings of `model.adapter` are those of PEFT, which checks them when the model is opened.
    """
    lora, defaults = model.lora, LoraConfig()
    check = OptionChecks(lora, "model.lora.")
    if not model.adapters.on:
        for name in ("alpha", "targets", "dropout", "modules_to_save", "base_dtype", "load_in_4bit", "revision"):
            check.require(
                getattr(lora, name) == getattr(defaults, name),
                name,
                "has no effect without adapters; set model.lora.rank, model.adapter, or model.lora.path to start from "
                "an adapter",
            )
        if ADAPTER in export_formats:
            raise ConfigError(
                f"export.formats={written(list(export_formats))}: there is no adapter to export; set model.lora.rank "
                "or model.adapter, or leave adapter out"
            )
        return
    check.at_least(1, "rank", "null trains the whole model")
    check.positive("alpha", "null is twice the rank")
    check.require(0 <= lora.dropout < 1, "dropout", "must be from 0 to below 1")
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    check.require(
        isinstance(targets, list) and bool(targets) and all(isinstance(name, str) and name for name in targets),
        "targets",
        f"must be {ALL_LINEAR}, or names of layers such as [q_proj,v_proj]",
    )
    check.require(
        ALL_LINEAR not in targets or len(targets) == 1, "targets", f"{ALL_LINEAR} includes the others; leave them out"
    )
    if lora.path is not None:
        for name in ("rank", "alpha", "targets", "dropout"):
            check.require(
                getattr(lora, name) == getattr(defaults, name),
                name,
                f"the adapter of model.lora.path={lora.path} has its own; leave one out",
            )
    check.require(
        lora.revision is None or lora.path is not None,
        "revision",
        "chooses a version of a Hub adapter; set model.lora.path to its id",
    )
    if ADAPTER in export_formats and "dense" in model.adapters.modules_to_save:
        raise ConfigError(
            f"export.formats has adapter and {model.adapters.section}.modules_to_save has dense: PEFT's adapter "
            "format cannot hold the heads behind the pooling; leave one of them out (the merged model has them)"
        )
    check.require(
        not lora.load_in_4bit or importlib.util.find_spec("bitsandbytes") is not None,
        "load_in_4bit",
        f"needs the package bitsandbytes, which is not installed: {install_command('qlora')}, or leave it out",
    )


def _check_data(data: DataConfig) -> None:
    check = OptionChecks(data, "data.")
    check.require(bool(data.train), "train", "is empty; give it files, such as data.train=[my.jsonl]")
    check.instruction_format()
    check_train_sources(data.train, "data.train")


def check_train_sources(sources: Sequence[TrainSource], option: str) -> None:
    """Raise a ConfigError for an option of a source that cannot work, or a name that two sources have."""
    paths_by_name: dict[str, str] = {}
    for source in sources:
        check = OptionChecks(source, f"{option}, {source.path}: ")
        check_values(source, f"{option}, {source.path}: ")
        check.require(
            source.documents_revision is None or source.documents is not None,
            "documents_revision",
            "has no effect without documents; write documents: ID",
        )
        try:
            parse_columns(source.columns)
            if source.where is not None:
                parse_condition(source.where)
        except ConfigError as error:
            raise ConfigError(f"{option}, {source.path}: {error}") from None
        check.instruction_format()
        _check_text_as_positive(source, check)
        if source.name is not None:
            other = paths_by_name.get(source.name)
            check.require(other is None, "name", f"is also the name of {other}")
            paths_by_name[source.name] = source.path


def _check_text_as_positive(source: TrainSource, check: OptionChecks) -> None:
    if not source.text_as_positive:
        return
    columns = parse_columns(source.columns)
    check.require(
        columns is None or (len(columns.texts) == 1 and columns.score is None),
        "text_as_positive",
        f"takes one column of texts, and columns={source.columns} are several; write columns: {{text: COLUMN}}",
    )
    check.require(
        source.format in (DataFormat.auto, DataFormat.columns),
        "text_as_positive",
        f"reads single texts, and rows of format={source.format.value} have documents; leave one of them out",
    )


def _check_train(train: TrainConfig) -> None:
    if (train.steps is None) == (train.epochs is None):
        raise ConfigError(
            f"train.steps={written(train.steps)} and train.epochs={written(train.epochs)}: exactly one of them says "
            "how long to train; write train.epochs=null or train.steps=null"
        )


def _check_parallel(parallel: ParallelConfig) -> None:
    check = OptionChecks(parallel, "parallel.")
    check.require(
        parallel.shard_size is None or parallel.strategy is Strategy.hsdp,
        "shard_size",
        f"is for parallel.strategy=hsdp, not {parallel.strategy.value}",
    )
    check.require(
        parallel.activation_checkpointing in (None, True, False, SELECTIVE),
        "activation_checkpointing",
        f"must be true, false, {SELECTIVE} or null, which recomputes as far as memory requires it",
    )
    for name in ("compile", "fused_kernels"):
        check.require(getattr(parallel, name) in (True, False, "auto"), name, "expected auto, true or false")
    check.require(
        not parallel.fp8 or parallel.precision is not Precision.fp32,
        "fp8",
        "rounds the products of parallel.precision=bf16, not fp32; leave one out",
    )
    check.require(
        not parallel.fp8 or importlib.util.find_spec("torchao") is not None,
        "fp8",
        f"needs the package torchao, which is not installed: {install_command('fp8')}, or leave it out",
    )
    check.require(
        parallel.fused_kernels is not True or importlib.util.find_spec("liger_kernel") is not None,
        "fused_kernels",
        f"needs the package liger-kernel, which is not installed: {install_command('liger')}, or write auto",
    )


def _check_evaluation(recipe: Recipe) -> None:
    evaluation = recipe.evaluation
    check, kind = OptionChecks(evaluation, "evaluation."), load_kind(recipe.model.kind)
    check_index(evaluation.index, "evaluation.index.", stores_vectors=False)
    check_index_of_kind(evaluation.index, "evaluation.index.", kind)
    for name in ("rerank_depth", "document_windows"):
        check.require(
            kind.scores_pairs or getattr(evaluation, name) == getattr(EvaluationConfig, name),
            name,
            f"is for model.kind=cross_encoder, not {recipe.model.kind}; leave it out",
        )
    if evaluation.patience is not None:
        check.require(
            recipe.checkpoint.best_metric is not None,
            "patience",
            "needs a metric to compare; set checkpoint.best_metric to set/metric, such as dev/ndcg@10",
        )
        check.require(evaluation.every > 0, "patience", "counts evaluations during training; set evaluation.every")
    check.require(
        not evaluation.trained_weights or recipe.optim.ema is not None,
        "trained_weights",
        "has no effect without optim.ema: the trained weights are what is evaluated",
    )
    check.require(evaluation.metrics != [], "metrics", "is empty; write metrics, such as [ndcg@10], or null")
    check_truncate_dims(evaluation.truncate_dims, "evaluation.truncate_dims")
    if evaluation.vectors:
        check_kind_of_vectors(load_kind(recipe.model.kind), "evaluation.vectors")
    check_sets(evaluation.sets, "evaluation.sets")
    check.require(
        evaluation.function is None or is_code_path(evaluation.function),
        "function",
        "must be module:function, such as my_metrics:measure",
    )


def check_sets(sets: Sequence[EvaluationSet], option: str) -> None:
    """Raise a ConfigError for a set that cannot work, named by its index in `option`, such as `evaluation.sets`."""
    for index, evaluation_set in enumerate(sets):
        check = OptionChecks(evaluation_set, f"{option}[{index}].")
        check_values(evaluation_set, f"{option}[{index}].")
        kind = evaluation_set.kind
        check.require(bool(evaluation_set.path), "path", "is empty; write a BEIR folder, a table or a Hub id")
        instead = evaluator_sets(evaluation_set.path, option)
        check.require(instead is None, "path", f"is a class of sentence-transformers: {instead}")
        try:
            columns = parse_columns(evaluation_set.columns)
        except ConfigError as error:
            raise ConfigError(f"{option}[{index}].{error}") from None
        is_of_one_text = kind in (SetKind.classification, SetKind.clustering)
        check.require(
            columns is None
            or (len(columns.texts) + (columns.score is not None) > 1 and (columns.by_role or not is_of_one_text)),
            "columns",
            "names at least two columns of a table, such as [question,answer], or {text: body, label: topic}",
        )
        check.require(
            columns is None or columns.prompt is None,
            "columns",
            "names a column of instructions, and a set has one for all queries: write query_prompt",
        )
        check.require(evaluation_set.metrics != [], "metrics", "is empty; write metrics, such as [ndcg@10], or null")
        check.require(
            evaluation_set.candidates is None or kind in (SetKind.auto, SetKind.reranking),
            "candidates",
            f"is for kind=reranking, not {kind.value}",
        )
        check.require(
            evaluation_set.train is None or kind in (SetKind.auto, SetKind.classification),
            "train",
            f"is for kind=classification, not {kind.value}",
        )


def _check_checkpoint(recipe: Recipe) -> None:
    check = OptionChecks(recipe.checkpoint, "checkpoint.")
    best = recipe.checkpoint.best_metric
    if best is not None:
        check.require(
            bool(recipe.evaluation.sets or recipe.evaluation.function),
            "best_metric",
            "needs a metric to compare; evaluation.sets is empty",
        )
        ours = metric_of_evaluator(best)
        hint = (
            ", such as dev/ndcg@10" if ours is None else f": write {ours}; docs/evaluate.md lists the metrics of sets"
        )
        check.require("/" in best, "best_metric", f"must be set/metric{hint}")


def check_export(export: ExportConfig, prefix: str = "") -> None:
    """Raise a ConfigError for an unknown format, an invalid size, or an id that the Hub does not accept."""
    check = OptionChecks(export, prefix)
    check_values(export, prefix)
    are_known = all(item in EXPORT_FORMATS for item in export.formats)
    check.require(are_known, "formats", f"must be of {', '.join(EXPORT_FORMATS)}")
    smaller = [name for name in (ONNX_FP16, ONNX_INT8, OPENVINO) if name in export.formats]
    check.require(
        not smaller or ONNX in export.formats, "formats", f"needs onnx, of which {', '.join(smaller)} is made"
    )
    size = _SIZE.fullmatch(export.max_file_size.strip().upper())
    check.require(
        size is not None and 0 < float(size[1]) < math.inf,
        "max_file_size",
        "must be a number above 0 with KB, MB, GB or TB, such as 5GB",
    )
    check.require(
        export.push_to_hub is None or is_repository_name(export.push_to_hub),
        "push_to_hub",
        "must be the id of a repository on the Hub, such as my-name/my-model, of letters, digits, -, _ and .",
    )
    is_license = export.license is None or re.fullmatch(r"[a-z0-9.+-]+", export.license) is not None
    check.require(is_license, "license", "must be an identifier of the Hub, such as apache-2.0")
    are_codes = all(re.fullmatch(r"[a-z]{2,3}|multilingual|code", code) for code in export.language)
    check.require(are_codes, "language", "must be ISO 639-1 codes, such as [en, zh], or multilingual")


def is_repository_name(name: str) -> bool:
    """Whether the Hub accepts it as the id of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _check_tracking(recipe: Recipe) -> None:
    tracking, last_step = recipe.tracking, recipe.train.steps
    check = OptionChecks(tracking, "tracking.")
    check.require(
        tracking.wandb or not tracking.wandb_artifacts,
        "wandb_artifacts",
        "uploads the model to wandb; write tracking.wandb=true as well",
    )
    for tracker, (arguments, example) in _TRACKER_ARGUMENTS.items():
        option = f"{tracker}_init"
        given = getattr(tracking, option) or {}
        check.require(
            isinstance(given, dict) and given.keys() <= set(arguments),
            option,
            f"must be a mapping of {', '.join(arguments)}, such as {example}",
        )
        for name, value in given.items():
            tags = dict if tracker == "mlflow" else list
            _check_tracker_argument(f"tracking.{option}.{name}", name, value, tags)
    check.require(all(step >= 1 for step in tracking.profile), "profile", "must be numbers of steps, counted from 1")
    num_steps = len(set(tracking.profile))
    hint = f"has {num_steps} steps; at most {MAX_PROFILED_STEPS}, because every operator of a step is kept in memory"
    check.require(num_steps <= MAX_PROFILED_STEPS, "profile", hint)
    is_within = last_step is None or max(tracking.profile, default=0) <= last_step
    check.require(is_within, "profile", f"train.steps={last_step} is the last step")
    ranks = tracking.profile_ranks
    are_ranks = ranks is None or (bool(ranks) and min(ranks) >= 0)
    check.require(are_ranks, "profile_ranks", "must be ranks, counted from 0; null for all")


def _check_tracker_argument(option: str, name: str, value: Any, tags: type) -> None:
    """Raise a ConfigError for an argument of a tracker that is not a text, or not what it has to be."""
    if name == "tags":
        is_right, allowed = isinstance(value, tags), "a list, such as [zh,small]"
        if tags is dict:
            is_right = is_right and all(isinstance(text, str) for item in value.items() for text in item)
            allowed = "a mapping of texts, such as {language: zh}"
    elif name == "mode":
        is_right, allowed = value in ("online", "offline"), "online or offline"
    else:
        is_right, allowed = isinstance(value, str), "a text"
    if not is_right:
        raise ConfigError(f"{option}={written(value)}: must be {allowed}")


def _check_no_sparsity(recipe: Recipe) -> None:
    """Only weights of words are regularized."""
    check, defaults = OptionChecks(recipe.sparsity, "sparsity."), SparsityConfig()
    for name in (field.name for field in fields(defaults)):
        check.require(
            getattr(recipe.sparsity, name) == getattr(defaults, name),
            name,
            f"is for model.kind=sparse, not {recipe.model.kind}; leave it out",
        )


def prompt_warnings(options: Any) -> list[str]:
    r"""A warning for each prompt and instruction format of a recipe, or of a command's options, with a literal `\n`.

    Neither a shell nor Hydra turns a backslash and an n into a newline, and single quotes in YAML do not either.
    """
    return [
        f"{name} has a backslash and an n, not a newline, and texts are encoded with both characters: write $'{name}="
        r'"first line\nsecond line"'
        "' in bash, or double quotes in YAML"
        for name, text in _prompts(options, "")
        if "\\n" in text
    ]


def untrained_prompt_warnings(sources: Sequence[TrainSource], prompts: Mapping[str, str]) -> list[str]:
    """A warning for each prompt of the model with which no source trains: evaluation and the export have that one.

    `prompts` are the model's, by name: `query` and `document`.
    """
    warnings = []
    for name in ("query", "document"):
        own = [getattr(source, f"{name}_prompt") for source in sources]
        model = prompts.get(name, "")
        if own and None not in own and model not in own:
            warnings.append(
                f"{name}_prompt of the sources ({', '.join(map(repr, dict.fromkeys(own)))}) is for training only, and "
                f"evaluation and the exported model put {model!r} before each {name}: write model.{name}_prompt, which "
                "sources without one of their own have as well"
            )
    return warnings


def _prompts(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _prompts(item, f"{prefix}[{index}]")
    elif is_dataclass(node):
        for field in fields(node):
            name, value = f"{prefix}.{field.name}" if prefix else field.name, getattr(node, field.name)
            if field.name in _PROMPTS and isinstance(value, str):
                yield name, value
            else:
                yield from _prompts(value, name)
