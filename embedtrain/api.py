"""The Python API: train, evaluate, mine, synthesize, export and encode, in a notebook, a test, or under torchrun.

    from embedtrain import train, evaluate, load_encoder

Every function composes and checks its options as the command of its name does, prints the same lines, and raises the
command's errors (`embedtrain.errors.EmbedtrainError`). One thread of a process calls them at a time; a forked process
calls none, if the one that it was forked from has. Without a launcher a world of one rank exists during the call;
under torchrun every rank calls the function with the same arguments and gets the same result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

from embedtrain.cli.in_process import SHARED_WORLD, own_process_state
from embedtrain.commands.synthesize.synthesis import read_synthesis
from embedtrain.config.code import register_code
from embedtrain.config.command_line import flatten, to_overrides
from embedtrain.config.command_options import EncodeOptions, PrecisionOptions, RankOptions, ShardOptions
from embedtrain.config.commands import COMMANDS
from embedtrain.config.compose import compose_command, compose_recipes
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.hydra_files import choices
from embedtrain.config.paths import require_models, require_recipe_paths, require_run, require_sets, require_sources
from embedtrain.config.recipe import DataConfig, Recipe
from embedtrain.config.validation import OptionChecks
from embedtrain.data.in_memory import InMemoryData, is_splits
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import ConfigError
from embedtrain.evaluation.sentence_transformers import TextEncoder
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import command_model_config, load_encoder_model
from embedtrain.inference.loading.load import quiet_libraries
from embedtrain.losses.types import Loss
from embedtrain.mining.folder import read_summary
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import METRICS_FILE, read_metrics
from embedtrain.training.train import train as run_training
from embedtrain.training.train import training_world

_EVALUATE, _MINE, _EXPORT = COMMANDS["evaluate"], COMMANDS["mine"], COMMANDS["export"]
_SYNTHESIZE = COMMANDS["synthesize"]
Metrics = dict[str, dict[str, float]]
StrPath = str | PathLike[str]


@dataclass(kw_only=True)
class EncoderOptions(RankOptions, PrecisionOptions, ShardOptions, EncodeOptions):
    """Options of `embedtrain.load_encoder`."""


@dataclass(frozen=True)
class TrainResult:
    """A finished training run."""

    output_dir: Path
    model_dir: Path  # opens with sentence-transformers and transformers
    step: int  # whose weights were exported: the last, or the best by checkpoint.best_metric
    has_trained: bool  # False: the run had finished before this call, which made the evaluation and the export
    metrics: Metrics  # of these weights: set -> metric -> value; empty if nothing was evaluated at this step

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: those with `loss` of training steps, those with `set` of evaluations."""
        return read_metrics(self.output_dir / METRICS_FILE)


@dataclass(frozen=True)
class MineResult:
    """Mined rows."""

    files: list[Path]  # one for each source; `train(data=files)` reads them
    summary: dict[str, Any]  # statistics of each source and the most suspicious labels: the content of summary.json


@dataclass(frozen=True)
class SynthesizeResult:
    """Rows of queries that a language model has written."""

    rows: Path  # `train(data=[result.rows])` reads them
    summary: dict[str, Any]  # what was asked for, thrown away and spent: the content of synthesis.json


def train(
    recipe: str | None = None,
    *,
    data: Any = None,
    evaluation: Any = None,
    loss: Any = None,
    config_dir: StrPath | None = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> TrainResult:
    """Train a model, or resume the run in `output_dir`, as `embedtrain train` does.

    A run that has finished is not trained again. An option that changes training is then an error.

        train(model="DIR", data=rows, train={"steps": 100}, output_dir="runs/first")

    Args:
        recipe: a name from `recipes/`, or from `config_dir`/recipe.
        data: training rows: a path, a list of rows (mappings), a DataFrame of pandas or polars, a `datasets.Dataset` or
            DatasetDict, a mapping of columns, a mapping with `path` or `rows` and options of a source; or a list of
            these. A mapping of other options is the group `data`.
        evaluation: evaluation sets: a path, rows as in `data`, a mapping with `queries`, `corpus` and `qrels`, or with
            `path` or `rows`, and options of a set; or a list of these. A mapping of other options is the group
            `evaluation`.
        loss: the name of a loss, a mapping of its options with `name`, or a class of your own; with arguments,
            `{"path": MyLoss, "kwargs": {...}}`. `evaluation={"function": measure}` names an evaluation function.
        options, more: all other options of a recipe, nested (`train={"steps": 100}`) or by their full name
            (`{"train.steps": 100}`). `model` may be a path. Values are exact: `${` in a text has no meaning.
        quiet: print nothing on standard output.

    Raises Stopped if a signal (Ctrl-C in a notebook) ends the run after the current step, with a checkpoint.
    """
    parameters = {
        **_group(data, "data", "train", DataConfig),
        **_group(evaluation, "evaluation", "sets", EvaluationConfig),
        **_loss(loss),
    }
    flat = flatten(Recipe, parameters, _with_model_path(options or {}), _with_model_path(more))
    if recipe is None and "output_dir" in flat:
        flat.setdefault("name", Path(flat["output_dir"]).name)
    memory = InMemoryData()
    _take_from_memory(flat, memory, {"data.train": "rows", "evaluation.sets": "evaluation"})
    flat = {option: _with_code_paths(value) for option, value in flat.items()}
    arguments = [*to_overrides({"recipe": recipe} if recipe is not None else {}), *to_overrides(flat)]
    if config_dir is not None:
        arguments += ["--config-dir", fspath(config_dir)]
    signals = StopSignals()
    with own_process_state("train", quiet=quiet), signals.listening():
        (composed,) = compose_recipes(arguments)
        with training_world(composed) as world:
            _write(memory, composed.output_dir, world)
            require_recipe_paths(composed)
            trained = run_training(composed, world, signals)
    directory = Path(composed.output_dir)
    return TrainResult(directory, trained.directory, trained.step, trained.has_trained, trained.metrics)


def evaluate(
    model: StrPath | TrainResult,
    sets: Any = None,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> Metrics:
    """Evaluate a model on sets, as `embedtrain evaluate` does: set -> metric -> value.

    Args:
        model: a model directory or Hub id, or the result of `train`.
        sets: as `evaluation` of `train`.
        options, more: other options of the command, such as `precision`, `subset`, `output_dir`, or `function`, a
            function of your own that measures the model.
    """
    memory = InMemoryData()
    flat = flatten(_EVALUATE.option_class, {"model": _model_path(model)}, _without_none(sets=sets), options or {}, more)
    _take_from_memory(flat, memory, {"sets": "evaluation"})
    flat = {option: _with_code_paths(value) for option, value in flat.items()}
    with own_process_state("evaluate", quiet=quiet):
        composed = _EVALUATE.compose(to_overrides(flat))
        reranker = composed.reranker
        require_models(model=composed.model, adapter=composed.adapter, reranker=reranker and reranker.path)
        with joined_world(composed.timeout) as world:
            _write(memory, composed.output_dir, world)
            require_sets(composed.sets)
            quiet_libraries()
            metrics: Metrics = _EVALUATE.run(composed)
            return metrics


def mine(
    model: StrPath | TrainResult,
    data: Any,
    output_dir: StrPath,
    *,
    corpus: Any = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> MineResult:
    """Mine hard negatives for training rows, as `embedtrain mine` does.

    Args:
        model: a model directory or Hub id, or the result of `train`.
        data: as `data` of `train`.
        output_dir: a new folder for the mined rows.
        corpus: further documents to search: a path, a mapping of options of `DataPath`, or a list of these.
        options, more: other options of the command, such as `negatives`, `relative_margin`, `teacher`.
    """
    memory = InMemoryData()
    parameters = {
        "model": _model_path(model),
        "data": data,
        "output_dir": fspath(output_dir),
        **_without_none(corpus=corpus),
    }
    flat = flatten(_MINE.option_class, parameters, options or {}, _with_code_paths(more))
    _take_from_memory(flat, memory, {"data": "rows"})
    with own_process_state("mine", quiet=quiet):
        composed = _MINE.compose(to_overrides(flat))
        require_models(model=composed.model, adapter=composed.adapter, teacher=composed.teacher)
        with joined_world(composed.timeout) as world:
            _write(memory, composed.output_dir, world)
            require_sources(composed.data, composed.corpus)
            files = _MINE.run(composed)
            summary: dict[str, Any] = {}
            with world.fail_together("reading the summary"):
                if world.is_main:
                    summary = read_summary(Path(composed.output_dir))
            return MineResult(files, world.broadcast(summary))


def synthesize(
    corpus: Any,
    output_dir: StrPath,
    *,
    writer: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> SynthesizeResult:
    """Have a language model write queries for documents, as `embedtrain synthesize` does.

        synthesize("documents.jsonl", "rows", writer={"model": "Qwen/Qwen3-4B-Instruct-2507"})

    Args:
        corpus: documents: a path, a mapping of options of `DataPath`, or a list of these.
        output_dir: a folder for the rows and all answers; the same call resumes.
        writer: options of the language model: `model`, `backend`, `url`, `key_env`, ...
        options, more: other options of the command, such as `queries`, `checks`, `max_requests`.

    Raises Stopped if a signal (Ctrl-C in a notebook) ends it after the requests in flight.
    """
    parameters = {"corpus": corpus, "output_dir": fspath(output_dir), "writer": writer}
    flat = flatten(_SYNTHESIZE.option_class, parameters, options or {}, more)
    signals = StopSignals()
    with own_process_state("synthesize", quiet=quiet), signals.listening():
        composed = _SYNTHESIZE.compose(to_overrides(flat))
        _SYNTHESIZE.require_paths(composed)
        with joined_world(composed.timeout) as world:
            rows = _SYNTHESIZE.run(composed, signals)
            summary: dict[str, Any] = {}
            with world.fail_together("reading the summary"):
                if world.is_main:
                    summary = read_synthesis(Path(composed.output_dir)) or {}
            return SynthesizeResult(rows, world.broadcast(summary))


def export(
    run: StrPath | TrainResult | None = None,
    *,
    step: int | str = "latest",
    output_dir: StrPath | None = None,
    sets: Any = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> Path:
    """Write a checkpoint of a run as a model directory, as `embedtrain export` does; returns the directory.

    Args:
        run: the output_dir of a run, or the result of `train`.
        step: `latest`, `best`, or the number of a saved step.
        output_dir: default: `model/` in the run's directory.
        sets: as `evaluation` of `train`: the graphs of `formats=["onnx", ...]` are measured on them.
        options, more: other options of the command, such as `formats`, `dtype`, `push_to_hub`, or `adapters` instead of
            `run`.
    """
    path = run.output_dir if isinstance(run, TrainResult) else run
    parameters = {"step": str(step), **_without_none(run=path, output_dir=output_dir, sets=sets)}
    flat = flatten(_EXPORT.option_class, parameters, options or {}, _with_code_paths(more))
    # The files of sets are read during the export only, and its output_dir holds nothing but the model.
    with own_process_state("export", quiet=quiet), TemporaryDirectory(prefix="embedtrain-") as folder:
        memory = InMemoryData(Path(folder))
        _take_from_memory(flat, memory, {"sets": "evaluation"})
        composed = _EXPORT.compose(to_overrides(flat))
        for exported in composed.runs:
            require_run(exported)
        with joined_world() as world:
            directory = ""
            with world.fail_together("exporting the model"):
                if world.is_main:
                    memory.write(Path(folder))
                    require_sets(composed.sets)
                    directory = str(_EXPORT.run(composed))
            return Path(world.broadcast(directory))


def load_encoder(
    model: StrPath | TrainResult, *, options: Mapping[str, Any] | None = None, quiet: bool = False, **more: Any
) -> TextEncoder:
    """Load a model, sharded over the ranks, to encode texts with it.

        with load_encoder("runs/first/model") as encoder:
            vectors = encoder.encode_queries(["how many bones does an adult have?"])

    Args:
        model: a model directory or Hub id, or the result of `train`.
        options, more: `precision`, `max_length`, `query_prompt`, `trust_remote_code`, ...: those of `EncoderOptions`.
    """
    flat = flatten(EncoderOptions, {"model": _model_path(model)}, options or {}, _with_code_paths(more))
    with own_process_state("load_encoder", quiet=quiet):
        composed = _check_encoder(compose_command("load_encoder", EncoderOptions, to_overrides(flat), ""))
        require_models(model=composed.model, adapter=composed.adapter)
        quiet_libraries()
        world = SHARED_WORLD.join(composed.timeout)
        try:
            loaded = load_encoder_model(command_model_config(composed), composed.precision, world)
            console = Console(enabled=world.is_main)
            for note in loaded.notes:
                console.note(note)
        except BaseException:
            SHARED_WORLD.leave()
            raise
    encoder = SentenceEncoder.from_model(loaded, world, chunk_tokens=composed.chunk_tokens, unshard=composed.unshard)
    return TextEncoder(encoder, loaded.source.prompts, close=SHARED_WORLD.leave)


def _group(value: Any, group: str, list_option: str, kind: type[Any]) -> dict[str, Any]:
    """The options of a group: its list option, unless `value` is a mapping of options of the group."""
    if value is None:
        return {}
    names = {field.name for field in fields(kind)}
    if (
        isinstance(value, Mapping)
        and (value.keys() & names and not value.keys() & {"path", "rows", "queries"})
        and (value.keys() <= names or not is_splits(value))  # a DatasetDict has a split `train`
    ):
        return {group: value}
    return {f"{group}.{list_option}": value}


def _loss(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, type) and issubclass(value, Loss):
        return {"loss": {"name": "custom", "path": value}}
    if isinstance(value, Mapping):
        return {"loss": {"name": "custom", **value} if "path" in value else value}
    if not isinstance(value, str):
        raise ConfigError(
            f"loss={value!r}: must be the name of a loss, a mapping of its options with `name`, or a subclass of "
            "embedtrain.losses.types.Loss"
        )
    return {"loss": value}


def _with_code_paths(value: Any) -> Any:
    """The value with the paths of the classes and functions in it."""
    if isinstance(value, Mapping):
        return {key: _with_code_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_code_paths(item) for item in value]
    return register_code(value) if isinstance(value, type | FunctionType) else value


def _with_model_path(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `model.path` for a `model` that is none of the ready-made ones."""
    result = dict(options)
    model = result.get("model")
    if isinstance(model, PathLike | TrainResult) or (isinstance(model, str) and model not in choices("model")):
        result["model.path"] = _model_path(result.pop("model"))
    return result


def _model_path(model: StrPath | TrainResult) -> str:
    return fspath(model.model_dir if isinstance(model, TrainResult) else model)


def _without_none(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _take_from_memory(flat: dict[str, Any], memory: InMemoryData, names: Mapping[str, str]) -> None:
    """Replace data in memory by the paths that it will have; `names` are those of rows and sets without a name."""
    for option, name in names.items():
        if option in flat:
            flat[option] = memory.sources(flat[option], option, name)


def _write(memory: InMemoryData, output_dir: str, world: World) -> None:
    with world.fail_together("writing data of the program"):
        if world.is_main:
            memory.write(Path(output_dir))


def _check_encoder(options: EncoderOptions) -> EncoderOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.at_least(1, "chunk_tokens")
    check.length("max_length")
    check.positive("timeout")
    return options
