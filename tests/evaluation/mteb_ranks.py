"""What the ranks do in tests of mteb: a module that does not import it, so that only rank 0 has to."""

from pathlib import Path

from embedtrain.config.recipe import ModelConfig, ParallelConfig, Precision
from embedtrain.evaluate.mteb.client import run_tasks
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.vector_cache import model_identity
from embedtrain.loading.load import load_model
from embedtrain.tracking.console import Console


def loaded(world, directory, **options):
    model = load_model(ModelConfig(path=str(directory)), ParallelConfig(precision=Precision.fp32), world, seed=0)
    prompts = model.source.prompts
    encoder = SentenceEncoder(
        model.encoder, model.tokenizer, world, chunk_tokens=2048,
        query_prompt=prompts.get("query", ""), document_prompt=prompts.get("document", ""),
    )  # fmt: skip
    identity = model_identity(model.source, Precision.fp32, world)
    named = {"name": str(directory), "source": model.source, "identity": identity}
    return encoder, world, Console(enabled=False), named | options


def made(world, *kinds):
    """Tasks by the names of their classes, on rank 0; mteb takes seconds to import."""
    if not world.is_main:
        return []
    from tests.evaluation import mteb_tasks

    return [getattr(mteb_tasks, kind)() for kind in kinds]


def run(world, directory, folder, kinds, max_characters=1500):
    """Figures and failures of some tasks."""
    encoder, world, console, options = loaded(world, directory)
    tasks = made(world, *kinds)
    outcome = run_tasks(tasks, encoder, world, console, folder=Path(folder), max_characters=max_characters, **options)
    return outcome.figures, outcome.failed


def what_fails(world, directory, folder):
    """What every rank raises, and what is left of the tasks around a failure."""
    figures, failed = run(world, directory, folder, ["Broken", "Retrieval"])
    encoder, world, console, options = loaded(world, directory)
    encoded = []
    encoder.progress = lambda what, done, total: encoded.append(what)
    again = run_tasks(made(world, "Retrieval"), encoder, world, console, folder=Path(folder), **options)
    other = run_tasks(made(world, "Sts"), encoder, world, console, folder=Path(folder), **options).figures
    before = len(encoded)
    try:
        run_tasks(made(world, "Interrupted"), encoder, world, console, folder=Path(folder) / "other", **options)
        raised = "nothing"
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}"
    world.barrier()  # and the ranks are still in step
    next(encoder.encoder.parameters()).data.fill_(float("nan"))
    try:
        run_tasks(made(world, "Retrieval"), encoder, world, console, folder=Path(folder) / "other", **options)
        infinite = "nothing"
    except Exception as error:
        infinite = f"{type(error).__name__}: {error}"
    return figures, failed, again.figures, other, encoded[:before], raised, infinite
