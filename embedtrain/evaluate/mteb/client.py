"""Runs tasks of mteb: rank 0 calls mteb, all ranks encode and search, results lie in mteb's own files."""

import contextlib
import functools
import hashlib
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World
from embedtrain.evaluate.mteb.model import MAX_CHARACTERS, ShardedModel
from embedtrain.evaluate.mteb.settings import MtebSettings, read_settings
from embedtrain.evaluate.mteb.work import CommandChannel, StartTask
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.models.source import ModelSource
from embedtrain.tracking.console import Console


@dataclass
class TaskResults:
    """What came out of some tasks, the same on every rank.

    Attributes:
        figures: by `task`, or `task/subset/split` where a task has several, the main score under its metric's name.
        failed: a sentence for each task that could not be run.
    """

    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def run_tasks(
    tasks: Sequence[Any],
    encoder: SentenceEncoder,
    world: World,
    console: Console,
    *,
    name: str,
    source: ModelSource,
    identity: Mapping[str, Any],
    folder: Path,
    index: IndexConfig | None = None,
    vector_cache: VectorCache | None = None,
    max_characters: int = MAX_CHARACTERS,
    progress: ProgressCallback | None = None,
) -> TaskResults:
    """Run tasks one after another. A collective; all but rank 0 only do as it says.

    What mteb finds in its files is not run again. A task that fails is told of, and the others still run.

    Args:
        tasks: from `resolve_tasks`; only rank 0's count.
        encoder: the live model.
        world: the ranks.
        console: where rank 0 says how far it is.
        name: the model's, as results are kept under: a Hub id, or a directory.
        source: what the model's directory says.
        identity: what decides about the model's vectors; results of another model of the same name are not taken.
        folder: where mteb's files are: `results/MODEL/REVISION/TASK.json`.
        index: how documents' vectors are kept while they are searched.
        vector_cache: where they are kept on disk.
        max_characters: characters of the texts that all ranks hold at a time.
        progress: called as `SentenceEncoder.progress` is, with the name of the task before what is being encoded.

    Raises:
        TrainingError: on every rank, if a vector is not finite on any.
        LostContact: another rank is gone.
        FailedElsewhere: on the other ranks, if rank 0 failed on its own.
    """
    index = index or IndexConfig()
    with world.fail_together("reading the model's settings for mteb"):
        settings = read_settings(source)
    if settings.note:
        console.warn(settings.note)
    unit = settings.similarity == "cosine"
    if vector_cache is not None and not unit:
        vector_cache = VectorCache(vector_cache.directory, {**vector_cache.identity, "similarity": settings.similarity})
    work = CommandChannel(encoder, world, index, unit=unit, vector_cache=vector_cache)
    outcome = TaskResults()
    if world.is_main:
        try:
            meta = _meta(name, identity, settings, encoder)
            model = ShardedModel(work, settings, meta, max_characters=max_characters)
            for task in tasks:
                work.do(StartTask(task.metadata.name))
                if progress is not None:
                    encoder.progress = functools.partial(_prefixed_progress, progress, task.metadata.name)
                with console.phase(f"running {task.metadata.name}"):
                    figures, failed = _run(task, model, folder, work)
                outcome.figures |= figures
                outcome.failed += failed
                for sentence in failed:
                    console.warn(sentence)
        except BaseException as error:
            work.end(error)
            raise
        work.end()
    else:
        work.serve()
    return world.broadcast(outcome)


def _prefixed_progress(progress: ProgressCallback, task: str, what: str, done: int, total: int) -> None:
    progress(f"{task}: {what}", done, total)


def _run(
    task: Any, model: ShardedModel, folder: Path, work: CommandChannel
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Figures of a task, and sentences about what failed."""
    import mteb

    name = task.metadata.name
    try:
        # Some of its progress bars have no switch.
        with contextlib.redirect_stderr(io.StringIO()):
            done = mteb.evaluate(
                model,
                task,
                co2_tracker=False,
                cache=mteb.ResultCache(folder),
                encode_kwargs={"batch_size": 1024, "show_progress_bar": False},
                show_progress_bar=False,
            )
    except Exception as error:  # whatever a data set, scikit-learn or mteb itself may raise
        if not work.in_sync:  # it is not about this task alone: vectors that are not finite, no memory, a rank is gone
            raise
        reason = textwrap.shorten(str(error) or "no reason given", 300, placeholder=" ...")
        what = "failed" if task.data_loaded else _dataset_unavailable(task)
        task.unload_data()
        return {}, [f"mteb task {name}: {what} ({type(error).__name__}: {reason})"]
    figures: dict[str, dict[str, float]] = {}
    for result in done.task_results:
        figures |= _metrics(result, task.metadata.main_score)
    return figures, [
        f"mteb task {name}: {_dataset_unavailable(task)} ({one.exception})" for one in done.exceptions or []
    ]


def _metrics(result: Any, metric: str) -> dict[str, dict[str, float]]:
    """Main scores of a task: all in one, and each of its subsets and splits where there are several."""
    parts = [(split, part) for split, rows in result.scores.items() for part in rows]
    parts = [(split, part) for split, part in parts if part.get("main_score") is not None]
    figures: dict[str, dict[str, float]] = {}
    if parts:
        mean = sum(float(part["main_score"]) for _, part in parts) / len(parts)
        figures[result.task_name] = {metric: mean}
    if len(parts) > 1:
        for split, part in parts:
            figures[f"{result.task_name}/{part['hf_subset']}/{split}"] = {metric: float(part["main_score"])}
    return figures


def _dataset_unavailable(task: Any) -> str:
    return f"its data set {(task.metadata.dataset or {}).get('path', 'of its own')} cannot be had"


def _meta(name: str, identity: Mapping[str, Any], settings: MtebSettings, encoder: SentenceEncoder) -> Any:
    """Who the model is to mteb. Its revision changes with whatever changes its vectors."""
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    progress = {**identity, "prompts": dict(settings.prompts), "max_length": encoder.tokenizer.max_length}
    progress |= {"tokenizer": encoder.tokenizer.fingerprint, "similarity": settings.similarity}
    digest = hashlib.blake2b(json.dumps(progress, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = Path(name).expanduser()
    # mteb's names are `organisation/model`; a directory is told by its own name and that of the folder around it.
    known_as = "/".join(path.resolve().parts[-2:]) if path.exists() else name
    return ModelMeta.create_empty(
        overwrites={
            "name": known_as if "/" in known_as else f"local/{known_as}",
            "revision": digest,
            "similarity_fn_name": ScoringFunction(settings.similarity),
            "max_tokens": encoder.tokenizer.max_length,
            "modalities": ["text"],
        }
    )
