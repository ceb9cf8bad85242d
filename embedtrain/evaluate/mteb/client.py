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
from embedtrain.evaluate.mteb.model import PORTION, ShardedModel
from embedtrain.evaluate.mteb.settings import Settings, settings_of
from embedtrain.evaluate.mteb.work import Begin, SharedWork
from embedtrain.inference.encode import SentenceEncoder, Told
from embedtrain.inference.vector_cache import StoredVectors
from embedtrain.models.source import ModelSource
from embedtrain.tracking.console import Console


@dataclass
class Outcome:
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
    stored: StoredVectors | None = None,
    portion: int = PORTION,
    told: Told | None = None,
) -> Outcome:
    """Run tasks one after another. A collective; all but rank 0 only do as it says.

    What mteb finds in its files is not run again. A task that fails is told of, and the others still run.

    Args:
        tasks: from `find_tasks`; only rank 0's count.
        encoder: the live model.
        world: the ranks.
        console: where rank 0 says how far it is.
        name: the model's, as results are kept under: a Hub id, or a directory.
        source: what the model's directory says.
        identity: what decides about the model's vectors; results of another model of the same name are not taken.
        folder: where mteb's files are: `results/MODEL/REVISION/TASK.json`.
        index: how documents' vectors are kept while they are searched.
        stored: where they are kept on disk.
        portion: characters of the texts that all ranks hold at a time.
        told: called as `SentenceEncoder.told` is, with the name of the task before what is being encoded.

    Raises:
        TrainingError: on every rank, if a vector is not finite on any.
        LostContact: another rank is gone.
        FailedElsewhere: on the other ranks, if rank 0 failed on its own.
    """
    index = index or IndexConfig()
    with world.together("reading the model's settings for mteb"):
        settings = settings_of(source)
    if settings.note:
        console.warn(settings.note)
    unit = settings.similarity == "cosine"
    if stored is not None and not unit:
        stored = StoredVectors(stored.directory, {**stored.identity, "similarity": settings.similarity})
    work = SharedWork(encoder, world, index, unit=unit, stored=stored)
    outcome = Outcome()
    if world.is_main:
        try:
            meta = _meta(name, identity, settings, encoder)
            model = ShardedModel(work, settings, meta, portion=portion)
            for task in tasks:
                work.do(Begin(task.metadata.name))
                if told is not None:
                    encoder.told = functools.partial(_tell, told, task.metadata.name)
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


def _tell(told: Told, task: str, what: str, done: int, total: int) -> None:
    told(f"{task}: {what}", done, total)


def _run(
    task: Any, model: ShardedModel, folder: Path, work: SharedWork
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
        if not work.in_step:  # it is not about this task alone: vectors that are not finite, no memory, a rank is gone
            raise
        reason = textwrap.shorten(str(error) or "no reason given", 300, placeholder=" ...")
        what = "failed" if task.data_loaded else _cannot_be_had(task)
        task.unload_data()
        return {}, [f"mteb task {name}: {what} ({type(error).__name__}: {reason})"]
    figures: dict[str, dict[str, float]] = {}
    for result in done.task_results:
        figures |= _figures(result, task.metadata.main_score)
    return figures, [f"mteb task {name}: {_cannot_be_had(task)} ({one.exception})" for one in done.exceptions or []]


def _figures(result: Any, metric: str) -> dict[str, dict[str, float]]:
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


def _cannot_be_had(task: Any) -> str:
    return f"its data set {(task.metadata.dataset or {}).get('path', 'of its own')} cannot be had"


def _meta(name: str, identity: Mapping[str, Any], settings: Settings, encoder: SentenceEncoder) -> Any:
    """Who the model is to mteb. Its revision changes with whatever changes its vectors."""
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    told = {**identity, "prompts": dict(settings.prompts), "max_length": encoder.tokenizer.max_length}
    told |= {"tokenizer": encoder.tokenizer.fingerprint, "similarity": settings.similarity}
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()
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
