"""Runs tasks of mteb: rank 0 calls mteb, all ranks encode and search, and results are mteb's own files."""

import contextlib
import difflib
import functools
import hashlib
import importlib.util
import io
import json
import logging
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedtrain.commands.evaluate.mteb_commands import CommandChannel, StartTask
from embedtrain.commands.evaluate.mteb_model import MAX_CHARACTERS, MtebSettings, ShardedModel
from embedtrain.config.evaluation import IndexConfig, SetKind
from embedtrain.errors import ConfigError, ModelError
from embedtrain.evaluation.evaluator import ResultCallback
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import install_command

# mteb's types of tasks that are kinds of evaluation sets; other types keep mteb's names.
_KINDS = {
    "Retrieval": SetKind.retrieval.value,
    "Reranking": SetKind.reranking.value,
    "STS": SetKind.sts.value,
    "PairClassification": SetKind.pair_classification.value,
    "BitextMining": SetKind.bitext.value,
    "Classification": SetKind.classification.value,
    "Clustering": SetKind.clustering.value,
}
_SETTINGS_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class EvaluatedModel:
    """The model that mteb evaluates."""

    encoder: SentenceEncoder
    source: ModelSource
    name: str  # for mteb's result files: a Hub id, or a directory
    identity: Mapping[str, Any]  # of its vectors; results of another model with the same name are not reused


@dataclass
class TaskResults:
    """The results of several tasks, the same on every rank."""

    # By `task`, or `task/subset/split` if a task has several, the main score by its name.
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # a sentence for each task that could not be run


def resolve_tasks(names: Sequence[str], reserved_names: Sequence[str] = ()) -> list[Any]:
    """The tasks and benchmarks of mteb with these names, in this order, each task once.

    Raises ConfigError if mteb is not installed, a name is unknown or reserved, or a task is not about text alone.
    """
    if importlib.util.find_spec("mteb") is None:
        raise ConfigError(f"mteb={list(names)} needs a package that is not installed: {install_command('mteb')}")
    import datasets
    import mteb
    from mteb.benchmarks import get_benchmarks
    from mteb.get_tasks import TASK_LIST

    # Hide mteb's log and the progress bars of libraries; the encoder reports progress.
    datasets.disable_progress_bars()
    logging.getLogger("mteb").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="mteb")
    task_names = {task.metadata.name for task in TASK_LIST}
    benchmarks = {
        name: benchmark for benchmark in get_benchmarks() for name in (benchmark.name, *(benchmark.aliases or ()))
    }
    tasks: list[Any] = []
    for name in names:
        if name in task_names:
            tasks.append(mteb.get_task(name))
        elif name in benchmarks:
            tasks += benchmarks[name].tasks
        else:
            similar = difflib.get_close_matches(name, [*task_names, *benchmarks], n=3)
            raise ConfigError(
                f"mteb: {name!r} is not a task or benchmark of mteb {mteb.__version__}"
                + (f"; did you mean {' or '.join(similar)}?" if similar else "; `mteb available-tasks` lists its tasks")
            )
    for task in tasks:
        if task.metadata.name in reserved_names:
            raise ConfigError(
                f"mteb: {task.metadata.name} is also the name of an evaluation set; "
                f"write {{path: ..., name: ...}} in sets for another"
            )
        modalities = [modality for modality in task.metadata.modalities if modality != "text"]
        if modalities:
            raise ConfigError(f"mteb: {task.metadata.name} has {' and '.join(modalities)}; only text is supported")
    # Subsets and splits may differ between a task and the same task in a benchmark.
    return list({(t.metadata.name, tuple(t.hf_subsets), tuple(t.eval_splits)): t for t in tasks}.values())


def run_tasks(
    tasks: Sequence[Any],
    model: EvaluatedModel,
    console: Console,
    folder: Path,
    *,
    index: IndexConfig | None = None,
    vector_cache: VectorCache | None = None,
    max_characters: int = MAX_CHARACTERS,
    progress: ProgressCallback | None = None,
    on_result: ResultCallback | None = None,
) -> TaskResults:
    """Run tasks one after another. A collective; the other ranks follow rank 0.

    Tasks with results in mteb's files are not run again. If a task fails, that is reported and the others still run.

    Args:
        tasks: from `resolve_tasks`; only those of rank 0 are used.
        folder: of mteb's files: `results/MODEL/REVISION/TASK.json`.
        max_characters: of the texts that are sent to all ranks at a time.
        progress: called with the name of the task before the description.
        on_result: called on rank 0 after each task.

    Raises TrainingError on every rank if a vector is not finite, FailedElsewhere on the others if rank 0 failed alone.
    """
    encoder, world = model.encoder, model.encoder.world
    with world.fail_together("reading the model's settings for mteb"):
        settings = read_settings(model.source)
    channel = CommandChannel(encoder, world, index or IndexConfig(), vector_cache=vector_cache)
    results = TaskResults()
    if world.is_main:
        try:
            meta = _model_meta(model, settings)
            sharded_model = ShardedModel(channel, settings, meta, max_characters=max_characters)
            for task in tasks:
                channel.run(StartTask(task.metadata.name))
                if progress is not None:
                    encoder.progress = functools.partial(_prefixed_progress, progress, task.metadata.name)
                with console.phase(f"running {task.metadata.name}"):
                    metrics, failures = _run_task(task, sharded_model, folder, channel)
                results.metrics |= metrics
                if on_result is not None:
                    kind = _KINDS.get(task.metadata.type, task.metadata.type)
                    dataset = DatasetInfo(kind, {}, subset=False, precision=encoder.precision)
                    for name, values in metrics.items():
                        on_result(name, values, dataset)
                results.failures += failures
                for failure in failures:
                    console.warn(failure)
        except BaseException as error:
            channel.finish(error)
            raise
        channel.finish()
    else:
        channel.serve()
    return world.broadcast(results, TaskResults)


def _prefixed_progress(progress: ProgressCallback, task: str, description: str, done: int, total: int) -> None:
    progress(f"{task}: {description}", done, total)


def _run_task(
    task: Any, model: ShardedModel, folder: Path, channel: CommandChannel
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The metrics of a task, and a sentence about each failure."""
    import mteb

    name = task.metadata.name
    try:
        # Some progress bars of mteb cannot be switched off.
        with contextlib.redirect_stderr(io.StringIO()):
            result = mteb.evaluate(
                model,
                task,
                co2_tracker=False,
                cache=mteb.ResultCache(folder),
                encode_kwargs={"batch_size": 1024, "show_progress_bar": False},
                show_progress_bar=False,
            )
    except Exception as error:  # data sets, scikit-learn and mteb itself may raise anything
        if not channel.in_sync:  # not an error of this task: vectors that are not finite, no memory, a lost rank
            raise
        reason = textwrap.shorten(str(error) or "no reason given", 300, placeholder=" ...")
        failure = "failed" if task.data_loaded else _dataset_unavailable(task)
        task.unload_data()
        return {}, [f"mteb task {name}: {failure} ({type(error).__name__}: {reason})"]
    metrics: dict[str, dict[str, float]] = {}
    for task_result in result.task_results:
        metrics |= _main_scores(task_result, task.metadata.main_score)
    unavailable = _dataset_unavailable(task)
    return metrics, [f"mteb task {name}: {unavailable} ({failure.exception})" for failure in result.exceptions or []]


def _main_scores(result: Any, metric: str) -> dict[str, dict[str, float]]:
    """The main score of a task, and of each of its subsets and splits if there are several."""
    parts = [(split, part) for split, rows in result.scores.items() for part in rows]
    parts = [(split, part) for split, part in parts if part.get("main_score") is not None]
    metrics: dict[str, dict[str, float]] = {}
    if parts:
        mean = sum(float(part["main_score"]) for _, part in parts) / len(parts)
        metrics[result.task_name] = {metric: mean}
    if len(parts) > 1:
        for split, part in parts:
            metrics[f"{result.task_name}/{part['hf_subset']}/{split}"] = {metric: float(part["main_score"])}
    return metrics


def _dataset_unavailable(task: Any) -> str:
    return f"its data set {(task.metadata.dataset or {}).get('path', '(no path)')} is not available"


def _model_meta(model: EvaluatedModel, settings: MtebSettings) -> Any:
    """The model's description for mteb. The revision changes with everything that its vectors depend on."""
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    tokenizer = model.encoder.tokenizer
    identity = {**model.identity, "prompts": dict(settings.prompts), "max_length": tokenizer.max_length}
    identity |= {"tokenizer": tokenizer.fingerprint, "similarity": settings.similarity}
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = expand_user(model.name)
    # mteb's names are `organization/model`; for a directory, its parent takes the place of the organization.
    name = "/".join(path.resolve().parts[-2:]) if path.exists() else model.name
    return ModelMeta.create_empty(
        overwrites={
            "name": name if "/" in name else f"local/{name}",
            "revision": digest,
            "similarity_fn_name": ScoringFunction(settings.similarity),
            "max_tokens": tokenizer.max_length,
            "modalities": ["text"],
        }
    )


def read_settings(source: ModelSource) -> MtebSettings:
    """The prompts of a model directory as sentence-transformers reads them, and how its vectors are compared."""
    content = _read_settings_file(source)
    default_prompt = source.prompts.get(str(content.get("default_prompt_name")), "")
    if source.kind.name in {"late_interaction", "m3"}:
        return MtebSettings(source.prompts, default_prompt, "cosine", has_text_vectors=False)
    return MtebSettings(source.prompts, default_prompt, source.similarity.value)


def _read_settings_file(source: ModelSource) -> dict[str, Any]:
    """The settings file is beside modules.json: in the directory of the backbone, or in its parent."""
    folders = [] if source.directory is None else [source.directory, source.directory.parent]
    path = next((folder / _SETTINGS_FILE for folder in folders if (folder / "modules.json").is_file()), None)
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}
