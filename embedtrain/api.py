"""The Python API: the commands as functions, and an encoder, in a notebook, a test, or under torchrun.

    from embedtrain import train, evaluate, load_encoder

Every function composes and checks its options as the command of its name does, prints the same lines, and raises the
command's errors (`embedtrain.errors.EmbedtrainError`). One thread of a process calls them at a time; a forked process
calls none, if the one that it was forked from has. Without a launcher a world of one rank exists during the call;
under torchrun every rank calls the function with the same arguments and gets the same result.
"""

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.cli.in_process import SHARED_WORLD, own_process_state
from embedtrain.commands.plan import make_plan
from embedtrain.commands.search import answers
from embedtrain.commands.synthesize.synthesis import read_synthesis
from embedtrain.config.code import register_code
from embedtrain.config.command_line import flatten, to_overrides
from embedtrain.config.command_options import EncodeOptions, PrecisionOptions, RankOptions, ShardOptions
from embedtrain.config.commands import COMMANDS, Command
from embedtrain.config.compose import compose_command, compose_recipes
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.help import keywords, python_options
from embedtrain.config.hydra_files import choices
from embedtrain.config.names import check_reranker_loss, unknown_loss
from embedtrain.config.paths import require_models, require_recipe_paths, require_run, require_sets, require_sources
from embedtrain.config.recipe import DataConfig, Recipe
from embedtrain.config.validation import OptionChecks
from embedtrain.data.images.item import plain
from embedtrain.data.in_memory import InMemoryData, is_splits
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import World, joined_world, rank_from_environment
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.sentence_transformers import TextEncoder
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import command_model_config, load_encoder_model
from embedtrain.inference.loading.load import quiet_libraries
from embedtrain.losses.types import Loss
from embedtrain.mining.folder import read_summary
from embedtrain.results import (
    FilterResult,
    Hits,
    Metrics,
    MineResult,
    PlanResult,
    SplitResult,
    SynthesizeResult,
    TrainResult,
)
from embedtrain.tracking.console import Console
from embedtrain.tracking.pages import Page
from embedtrain.training.train import train as run_training
from embedtrain.training.train import training_world

if TYPE_CHECKING:
    from typing import Unpack

    from embedtrain.keywords import (
        EncoderKeywords,
        EvaluateKeywords,
        ExportKeywords,
        FilterKeywords,
        MineKeywords,
        SearchKeywords,
        SplitKeywords,
        SynthesizeKeywords,
        TrainKeywords,
    )

_EVALUATE, _MINE, _EXPORT = COMMANDS["evaluate"], COMMANDS["mine"], COMMANDS["export"]
_SYNTHESIZE, _FILTER, _SPLIT = COMMANDS["synthesize"], COMMANDS["filter"], COMMANDS["split"]
_SEARCH, _PLAN = COMMANDS["search"], COMMANDS["plan"]
StrPath = str | PathLike[str]


@dataclass(kw_only=True)
class EncoderOptions(RankOptions, PrecisionOptions, ShardOptions, EncodeOptions):
    """Options of `embedtrain.load_encoder`."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _takes(*kinds: type) -> Callable[[_Function], _Function]:
    """Give a function the options of these dataclasses in its docstring and in its signature."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        # The options of a group that is a parameter, such as `data` of `train`, are among those of the docstring.
        listed = "\n".join(python_options(kind, {"loss"} if kind is Recipe else signature.parameters) for kind in kinds)
        accepted = [each for kind in kinds for each in keywords(kind, signature.parameters)]
        text = (
            f"{inspect.cleandoc(function.__doc__ or '')}\n\n"
            "Options, each with its type, default and meaning. Write those of a group as a mapping,\n"
            '`train={"steps": 100}`, or by their full name, `options={"train.steps": 100}`.\n\n'
            f"{listed}"
        )
        function.__doc__ = text
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *accepted])
        return function

    return decorate


@_takes(Recipe)
def train(
    recipe: str | None = None,
    *,
    data: Any = None,
    evaluation: Any = None,
    loss: Any = None,
    config_dir: StrPath | None = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[TrainKeywords]",
) -> TrainResult:
    """Train a model, or resume the run in `output_dir`, as `embedtrain train` does.

    A run that has finished is not trained again. An option that changes training is then an error.

        short = {"train.steps": 100, "optim.warmup": 0.05}
        trained = train("minilm", model="minilm", data=rows, evaluation=dev, options=short, output_dir="runs/first")
        trained.model_dir, trained.metrics_before, trained.metrics

    Args:
        recipe: a name from `recipes/`, or from `config_dir`/recipe. Its values replace the defaults below.
        data: training rows: a path, a list of rows (mappings), a DataFrame of pandas or polars, a `datasets.Dataset` or
            DatasetDict, a mapping of columns, a mapping with `path` or `rows` and options of a source; or a list of
            these. A mapping of other options is the group `data`.
        evaluation: evaluation sets: a path, rows as in `data`, a mapping with `queries`, `corpus` and `qrels`, or with
            `path` or `rows`, and options of a set; or a list of these. A mapping of other options is the group
            `evaluation`.
        loss: the name of a loss, a mapping of its options with `name`, or a class of your own; with arguments,
            `{"path": MyLoss, "kwargs": {...}}`. `evaluation={"function": measure}` names an evaluation function.
        config_dir: a folder whose `recipe/NAME.yaml` are further recipes.
        options, more: all other options of a recipe, listed below. `model` may be a path or a Hub id. Values are exact:
            `${` in a text has no meaning.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        TrainResult, with `output_dir`, `model_dir`, `step`, `has_trained`, `metrics`, `metrics_before` and `history`.

    Raises:
        EmbedtrainError: an option, the data or the model cannot be used, with the message of the command.
        Stopped: a signal (Ctrl-C in a notebook) has ended the run after the current step, with a checkpoint. The same
            call resumes.
    """
    parameters = {
        **_group(data, "data", "train", DataConfig),
        **_group(evaluation, "evaluation", "sets", EvaluationConfig),
        **_loss(loss),
    }
    flat = flatten(Recipe, parameters, _with_model_path(options or {}), _with_model_path(more))
    if recipe is None and "output_dir" in flat:
        flat.setdefault("name", Path(flat["output_dir"]).name)
    signals = StopSignals()
    with own_process_state("train", quiet=quiet), _memory(flat) as memory, signals.listening():
        _take_from_memory(flat, memory, {"data.train": "rows", "evaluation.sets": "evaluation"})
        flat = {option: _with_code_paths(value) for option, value in flat.items()}
        arguments = [*to_overrides({"recipe": recipe} if recipe is not None else {}), *to_overrides(flat)]
        if config_dir is not None:
            arguments += ["--config-dir", fspath(config_dir)]
        (composed,) = compose_recipes(arguments)
        with training_world(composed) as world:
            _write(memory, composed.output_dir, world, RunDirectory(Path(composed.output_dir)).recipe)
            require_recipe_paths(composed)
            trained = run_training(composed, world, signals)
    directory = Path(composed.output_dir)
    return TrainResult(directory, trained.directory, trained.step, trained.has_trained, Metrics(trained.metrics))


@_takes(_EVALUATE.option_class)
def evaluate(
    model: StrPath | TrainResult,
    sets: Any = None,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[EvaluateKeywords]",
) -> Metrics:
    """Evaluate a model on sets, as `embedtrain evaluate` does.

        evaluate("runs/first/model", "dev/", output_dir="runs/first/evaluate")["dev"]["ndcg@10"]

    Args:
        model: a model directory or Hub id, or the result of `train`.
        sets: as `evaluation` of `train`.
        options, more: other options of the command, listed below. `function` may be a function of your own that
            measures the model.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        Metrics, a dict: set -> metric -> value.

    Raises:
        EmbedtrainError: as the command does.
    """
    flat = flatten(_EVALUATE.option_class, {"model": _model_path(model)}, _without_none(sets=sets), options or {}, more)
    with own_process_state("evaluate", quiet=quiet), _memory(flat) as memory:
        _take_from_memory(flat, memory, {"sets": "evaluation"})
        flat = {option: _with_code_paths(value) for option, value in flat.items()}
        composed = _EVALUATE.compose(to_overrides(flat))
        reranker = composed.reranker
        require_models(model=composed.model, adapter=composed.adapter, reranker=reranker and reranker.path)
        with joined_world(composed.timeout) as world:
            _write(memory, composed.output_dir, world)
            require_sets(composed.sets)
            quiet_libraries()
            return Metrics(_EVALUATE.run(composed))


@_takes(_MINE.option_class)
def mine(
    model: StrPath | TrainResult,
    data: Any,
    output_dir: StrPath,
    *,
    corpus: Any = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[MineKeywords]",
) -> MineResult:
    """Mine hard negatives for training rows, as `embedtrain mine` does.

        mined = mine("runs/first/model", rows, "mined", negatives=7)
        train("minilm", data=mined.files, output_dir="runs/second")

    Args:
        model: a model directory or Hub id, or the result of `train`.
        data: as `data` of `train`.
        output_dir: a new folder for the mined rows.
        corpus: further documents to search: a path, a mapping of options of `DataPath`, a list of these, or documents
            in memory as in `search`.
        options, more: other options of the command, listed below.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        MineResult, with the `files` of mined rows and a `summary`.

    Raises:
        EmbedtrainError: as the command does.
    """
    given = {"model": _model_path(model), "data": data, "output_dir": output_dir, **_without_none(corpus=corpus)}
    return MineResult(*_search_rows(_MINE, given, options, more, quiet=quiet))


@_takes(_FILTER.option_class)
def filter(
    model: StrPath | TrainResult,
    data: Any,
    output_dir: StrPath,
    *,
    corpus: Any = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[FilterKeywords]",
) -> FilterResult:
    """Keep the training rows whose positives a model ranks high, as `embedtrain filter` does.

        kept = embedtrain.filter("intfloat/multilingual-e5-small", rows, "kept", keep_rank=50)
        train("minilm", data=kept.files, output_dir="runs/first")

    Args:
        model: a model directory or Hub id, or the result of `train`.
        data: as `data` of `train`.
        output_dir: a folder for the rows; the same call resumes.
        corpus: further documents to rank among, as in `mine`.
        options, more: other options of the command, listed below.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        FilterResult, with the `files` of kept rows and a `summary`.

    Raises:
        EmbedtrainError: as the command does.
    """
    given = {"model": _model_path(model), "data": data, "output_dir": output_dir, **_without_none(corpus=corpus)}
    return FilterResult(*_search_rows(_FILTER, given, options, more, quiet=quiet))


@_takes(_SPLIT.option_class)
def split(
    data: Any,
    output_dir: StrPath,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[SplitKeywords]",
) -> SplitResult:
    """Hold out queries of training rows as an evaluation set, as `embedtrain split` does.

        parts = split(frame, "data", dev=300)
        train("minilm", data=parts.files, evaluation=parts.dev, output_dir="runs/first")

    Args:
        data: as `data` of `train`.
        output_dir: a folder for `train.jsonl` and `dev/`, which must not exist in it.
        options, more: other options of the command, listed below.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        SplitResult, with the `files` of training rows, the set `dev`, and a `summary`.

    Raises:
        EmbedtrainError: as the command does.
    """
    with _one_process(_SPLIT, {"data": data, "output_dir": output_dir}, options, more, quiet=quiet) as composed:
        written = _SPLIT.run(composed)
        return SplitResult(written.files, asdict(written.counts))


@_takes(_SEARCH.option_class)
def search(
    model: StrPath | TrainResult,
    corpus: Any,
    queries: Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[SearchKeywords]",
) -> list[Hits]:
    """Find the documents of a corpus that answer each query, as `embedtrain search` does.

        (hits,) = search("runs/first/model", {"d1": "The adult skeleton has 206 bones."}, ["number of bones"])
        hits[0].score, hits[0].id, hits[0].text

    Args:
        model: a model directory or Hub id, or the result of `train`.
        corpus: a path, or documents: `{id: text}`, rows with `id` and `text`, a DataFrame, a Dataset.
        queries: texts.
        options, more: other options of the command, listed below.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        Of each query its `top_k` best documents: a list of hits with `score`, `id` and `text`.

    Raises:
        EmbedtrainError: as the command does.
    """
    if isinstance(queries, str) or not all(isinstance(query, str) for query in queries):
        raise ConfigError(f"queries={queries!r}: must be a list of texts; write [{queries!r}] for one")
    given = {"model": _model_path(model), "corpus": corpus}
    with _one_process(_SEARCH, given, options, more, quiet=quiet) as composed:
        quiet_libraries()
        return [Hits(hits) for _, hits in answers(composed, [list(map(plain, queries))] if queries else [])]


@_takes(_PLAN.option_class, Recipe)
def plan(
    recipe: str | None = None,
    *,
    config_dir: StrPath | None = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> PlanResult:
    """Estimate memory, strategy and time of a training or a search, as `embedtrain plan` does.

        plan("bce_xlmr", gpus=64, gpu_memory=80).fits
        plan(model="DIR", documents=10_000_000).summary["seconds"]

    No GPU and no weights are needed.

    Args:
        recipe: as in `train`.
        config_dir: as in `train`.
        options, more: the hardware and what is planned, and all options of a recipe, listed below.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        PlanResult: `fits`, `summary`, and the tables as `text`.

    Raises:
        EmbedtrainError: as the command does; that it does not fit is no error.
    """
    own = {field.name for field in fields(_PLAN.option_class)}
    given = {**(options or {}), **more}
    flat = flatten(_PLAN.option_class, {name: given.pop(name) for name in list(given) if name.partition(".")[0] in own})
    flat |= flatten(Recipe, _with_model_path(given))
    arguments = [*to_overrides({"recipe": recipe} if recipe is not None else {}), *to_overrides(flat)]
    if config_dir is not None:
        arguments += ["--config-dir", fspath(config_dir)]
    with own_process_state("plan", quiet=quiet):
        planned = make_plan(_PLAN.compose(arguments))
        planned.show(Page())
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            planned.show(Page())
    return PlanResult(planned.fits, planned.content, text.getvalue().strip("\n"))


@_takes(_SYNTHESIZE.option_class)
def synthesize(
    corpus: Any,
    output_dir: StrPath,
    *,
    writer: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[SynthesizeKeywords]",
) -> SynthesizeResult:
    """Have a language model write queries for documents, as `embedtrain synthesize` does.

        synthesize("documents.jsonl", "rows", writer={"model": "Qwen/Qwen3-4B-Instruct-2507"})

    Args:
        corpus: documents: a path, a mapping of options of `DataPath`, or a list of these.
        output_dir: a folder for the rows and all answers; the same call resumes.
        writer: options of the language model: `model`, `backend`, `url`, `key_env`, ...
        options, more: other options of the command, listed below.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        SynthesizeResult, with the file `rows` and a `summary`.

    Raises:
        EmbedtrainError: as the command does.
        Stopped: a signal (Ctrl-C in a notebook) has ended it after the requests in flight.
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


@_takes(_EXPORT.option_class)
def export(
    run: StrPath | TrainResult | None = None,
    *,
    step: int | str = "latest",
    output_dir: StrPath | None = None,
    sets: Any = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[ExportKeywords]",
) -> Path:
    """Write a checkpoint of a run as a model directory, as `embedtrain export` does.

        export("runs/first", step="best", output_dir="models/best")

    Args:
        run: the output_dir of a run, or the result of `train`.
        step: `latest`, `best`, or the number of a saved step.
        output_dir: default: `model/` in the run's directory.
        sets: as `evaluation` of `train`: the graphs of `formats=["onnx", ...]` are measured on them.
        options, more: other options of the command, listed below, such as `adapters` instead of `run`.
        quiet: print nothing on standard output; warnings go to Python's `warnings`.

    Returns:
        The model directory.

    Raises:
        EmbedtrainError: as the command does.
    """
    path = run.output_dir if isinstance(run, TrainResult) else run
    parameters = {"step": str(step), **_without_none(run=path, output_dir=output_dir, sets=sets)}
    flat = flatten(_EXPORT.option_class, parameters, options or {}, _with_code_paths(more))
    # The files of sets are read during the export only, and its output_dir holds nothing but the model.
    with own_process_state("export", quiet=quiet), TemporaryDirectory(prefix="embedtrain-") as folder:
        memory = _memory(flat, Path(folder))
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


@_takes(EncoderOptions)
def load_encoder(
    model: StrPath | TrainResult,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: "Unpack[EncoderKeywords]",
) -> TextEncoder:
    """Load a model, sharded over the ranks, to encode texts with it.

        with load_encoder("runs/first/model") as encoder:
            vectors = encoder.encode_queries(["how many bones does an adult have?"])

    Args:
        model: a model directory or Hub id, or the result of `train`.
        options, more: how the model computes, listed below.
        quiet: print nothing on standard output, nor does `encode`, unless it is called with `show_progress_bar=True`.

    Returns:
        TextEncoder, with `encode`, `encode_queries`, `encode_documents`, `similarity` and `close`.

    Raises:
        EmbedtrainError: the model cannot be loaded.
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
    return TextEncoder(encoder, loaded.source.prompts, close=SHARED_WORLD.leave, shows_progress=not quiet)


def _search_rows(
    command: Command,
    given: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    more: Mapping[str, Any],
    *,
    quiet: bool,
) -> tuple[list[Path], dict[str, Any]]:
    """Run a command that searches for training rows; the files and the summary that it has written."""
    flat = flatten(command.option_class, given, options or {}, _with_code_paths(more))
    with own_process_state(command.name, quiet=quiet), _memory(flat) as memory:
        _take_from_memory(flat, memory, {"data": "rows"})
        if "corpus" in flat:
            flat["corpus"] = memory.corpus(flat["corpus"], "corpus")
        composed = command.compose(to_overrides(flat))
        require_models(model=composed.model, adapter=composed.adapter, teacher=composed.teacher)
        with joined_world(composed.timeout) as world:
            _write(memory, composed.output_dir, world)
            require_sources(composed.data, composed.corpus)
            files: list[Path] = command.run(composed)
            summary: dict[str, Any] = {}
            with world.fail_together("reading the summary"):
                if world.is_main:
                    summary = read_summary(Path(composed.output_dir))
            return files, world.broadcast(summary)


@contextlib.contextmanager
def _one_process(
    command: Command,
    given: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    more: Mapping[str, Any],
    *,
    quiet: bool,
) -> Iterator[Any]:
    """The checked options of a command of one process, whose data in memory is in files during the block."""
    flat = flatten(command.option_class, given, options or {}, _with_code_paths(more))
    with own_process_state(command.name, quiet=quiet), TemporaryDirectory(prefix="embedtrain-") as folder:
        with _memory(flat, Path(folder)) as memory:
            if "corpus" in given:
                flat["corpus"] = memory.corpus(flat["corpus"], "corpus")
            _take_from_memory(flat, memory, {"data": "rows"})
            composed = command.compose(to_overrides(flat))
            memory.write(Path(folder))
        command.require_paths(composed)
        yield composed


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
        _reject_other_library(value.get("path"))
        return {"loss": {"name": "custom", **value} if "path" in value else value}
    _reject_other_library(value)
    if not isinstance(value, str):
        raise ConfigError(
            f"loss={value!r}: must be the name of a loss, a mapping of its options with `name`, or a subclass of "
            "embedtrain.losses.types.Loss"
        )
    return {"loss": value}


def _reject_other_library(loss: Any) -> None:
    """Name our loss for a loss of sentence-transformers, a class or an object."""
    kind = loss if isinstance(loss, type) else type(loss)
    if kind.__module__.startswith("sentence_transformers."):
        if ".cross_encoder." in kind.__module__:
            check_reranker_loss(kind.__name__)
        raise ConfigError(unknown_loss("loss", kind.__name__))


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


def _memory(flat: Mapping[str, Any], folder: Path | None = None) -> InMemoryData:
    """Data in memory of a call, for the files that rank 0 writes."""
    rank = dist.get_rank() if dist.is_initialized() else rank_from_environment()
    return InMemoryData(folder, near=flat.get("output_dir"), keeps=rank == 0)


def _take_from_memory(flat: dict[str, Any], memory: InMemoryData, names: Mapping[str, str]) -> None:
    """Replace data in memory by the paths that it will have; `names` are those of rows and sets without a name."""
    for option, name in names.items():
        if option in flat:
            flat[option] = memory.sources(flat[option], option, name)


def _write(memory: InMemoryData, output_dir: str, world: World, record: Path | None = None) -> None:
    """Put data in memory at its place, on rank 0; the same error on every rank if the ranks hold different rows.

    `record` is that of `InMemoryData.write`.
    """
    held = world.gather(sorted(memory.digests))
    other = next((rank for rank, names in enumerate(held) if names != held[0]), None)
    if other is not None:
        raise DataError(
            f"data in memory: rank {other} holds other rows than rank 0, or in another order: every rank passes the "
            "same rows; seed what shuffles or samples them, and sort what comes from a set"
        )
    with world.fail_together("writing data of the program"):
        if world.is_main:
            memory.write(Path(output_dir), record)


def _check_encoder(options: EncoderOptions) -> EncoderOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.at_least(1, "chunk_tokens")
    check.length("max_length")
    check.positive("timeout")
    return options
