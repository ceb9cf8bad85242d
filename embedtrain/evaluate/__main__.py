"""`torchrun -m embedtrain.evaluate model=DIR sets=[...] mteb=[...]`: evaluate a model, sharded over all ranks."""

from typing import TYPE_CHECKING

from embedtrain.cli import run_command
from embedtrain.evaluate.options import EvaluateOptions, compose_evaluate
from embedtrain.loading.command_model import command_model_config

if TYPE_CHECKING:
    from embedtrain.distributed.world import World
    from embedtrain.loading.load import LoadedModel
    from embedtrain.tracking.console import Console


Figures = dict[str, dict[str, float]]


def act(options: EvaluateOptions) -> None:
    """Load the model onto the ranks, measure it on every set and task, print tables, add rows to metrics.jsonl."""
    from pathlib import Path

    from embedtrain.data.cache.cache import Cache, cache_place
    from embedtrain.distributed.world import joined_world
    from embedtrain.errors import DataError
    from embedtrain.evaluate.mteb.client import TaskResults, run_tasks
    from embedtrain.evaluate.mteb.tasks import resolve_tasks
    from embedtrain.evaluation.evaluator import Evaluator
    from embedtrain.evaluation.sets import load_sets
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.vector_cache import VectorCache, model_identity
    from embedtrain.tracking.console import Console

    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        place = cache_place(None, Path(options.output_dir) / "cache", world, console.note)
        sets = load_sets(options.sets, world, subset=options.subset, option="sets", cache=Cache(directory=place))
        for note in (note for loaded in sets for note in loaded.notes):
            console.note(note)
        with world.fail_together("looking up mteb's tasks"):
            reserved_names = [loaded.data.name for loaded in sets]
            tasks = resolve_tasks(options.mteb, reserved_names) if options.mteb and world.is_main else []
        output_dir = Path(options.output_dir)
        with world.fail_together("making the output directory"):
            output_dir.mkdir(parents=True, exist_ok=True)
        model = _load(options, world, console)
        prompts = model.source.prompts
        encoder = SentenceEncoder(
            model.encoder,
            model.tokenizer,
            world,
            chunk_tokens=options.chunk_tokens,
            query_prompt=prompts.get("query", ""),
            document_prompt=prompts.get("document", ""),
            unshard=options.unshard,
        )
        identity = {**model_identity(model.source, options.precision, world), "index": options.index.dtype.value}
        vector_cache = VectorCache(Path(options.vectors_dir).expanduser(), identity) if options.vectors_dir else None
        figures: Figures = {}
        outcome = TaskResults()
        with console.progress() as progress:
            if sets:
                evaluator = Evaluator(
                    sets, encoder, world, run_depth=options.run_depth, index=options.index, vector_cache=vector_cache
                )
                with console.phase("evaluating"):
                    runs = output_dir / "runs" if options.save_runs else None
                    figures = evaluator.evaluate(save_runs=runs, progress=progress)
            if options.mteb:
                outcome = run_tasks(
                    tasks,
                    encoder,
                    world,
                    console,
                    name=options.model,
                    source=model.source,
                    identity=identity,
                    folder=output_dir / "mteb",
                    index=options.index,
                    vector_cache=vector_cache,
                    progress=progress,
                )
        _report(options, figures | outcome.figures, world, console)
        if outcome.failed:
            raise DataError(f"{len(outcome.failed)} of mteb's tasks could not be run: {'; '.join(outcome.failed)}")


def _load(options: EvaluateOptions, world: "World", console: "Console") -> "LoadedModel":
    """The model on the ranks, and what was found of it."""
    from embedtrain.config.recipe import ParallelConfig
    from embedtrain.loading.command_model import MODEL_OPTION_NAMES, command_option_names
    from embedtrain.loading.load import load_model

    with command_option_names(MODEL_OPTION_NAMES):
        model = load_model(
            command_model_config(options),
            ParallelConfig(precision=options.precision),
            world,
            seed=0,
            work=None,
        )
    for note in model.notes:
        console.note(note)
    return model


def _report(options: EvaluateOptions, figures: Figures, world: "World", console: "Console") -> None:
    """Tables, what it took, and a row in metrics.jsonl for each set."""
    from pathlib import Path

    from embedtrain.tracking.metrics import METRICS_FILE, MetricsFile
    from embedtrain.tracking.tracker import peak_memory_gib

    console.evaluation(0, figures, title=f"evaluation of {options.model}")
    peak = max(world.gather(peak_memory_gib(world.device)))
    console.note(f"{world.size} rank{'s' * (world.size > 1)}, at most {peak:.2f} GiB of memory on each")
    path = Path(options.output_dir) / METRICS_FILE
    with world.fail_together("writing metrics.jsonl"):
        if world.is_main and figures:
            metrics = MetricsFile(path)
            for name, values in figures.items():
                metrics.append({"step": 0, "set": name, "model": options.model, **values})
            metrics.close()
            console.note(f"rows added to {path}")


if __name__ == "__main__":
    run_command(compose_evaluate, act)
