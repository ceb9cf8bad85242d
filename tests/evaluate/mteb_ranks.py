"""What the ranks do in tests of mteb: a module that does not import it, so that only rank 0 has to."""

from pathlib import Path

from embedtrain.commands.evaluate.mteb_client import EvaluatedModel, run_tasks
from embedtrain.config.recipe import Precision
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model
from embedtrain.inference.vector_cache import model_identity
from embedtrain.tracking.console import Console
from tests.small import model_options


def load(world, directory):
    model = load_encoder_model(model_options(path=str(directory)), Precision.fp32, world)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=2048)
    identity = model_identity(model.source, Precision.fp32, world)
    return EvaluatedModel(encoder, model.source, str(directory), identity), Console(enabled=False)


def make_tasks(world, *kinds):
    """Tasks by the names of their classes, on rank 0; mteb takes seconds to import."""
    if not world.is_main:
        return []
    from tests.evaluate import mteb_tasks

    return [getattr(mteb_tasks, kind)() for kind in kinds]


def run(world, directory, folder, kinds, max_characters=1500):
    """Metrics and failures of some tasks."""
    model, console = load(world, directory)
    results = run_tasks(make_tasks(world, *kinds), model, console, Path(folder), max_characters=max_characters)
    return results.metrics, results.failures


def run_and_fail(world, directory, folder):
    """What every rank raises, and the results of the tasks around a failure."""
    metrics, failures = run(world, directory, folder, ["Broken", "Retrieval"])
    model, console = load(world, directory)
    encoded = []
    model.encoder.progress = lambda description, done, total: encoded.append(description)
    again = run_tasks(make_tasks(world, "Retrieval"), model, console, Path(folder))
    other = run_tasks(make_tasks(world, "Sts"), model, console, Path(folder)).metrics
    before = len(encoded)
    try:
        run_tasks(make_tasks(world, "Interrupted"), model, console, Path(folder) / "other")
        raised = "nothing"
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}"
    world.barrier()  # the ranks are still in step
    next(model.encoder.encoder.parameters()).data.fill_(float("nan"))
    try:
        run_tasks(make_tasks(world, "Retrieval"), model, console, Path(folder) / "other")
        infinite = "nothing"
    except Exception as error:
        infinite = f"{type(error).__name__}: {error}"
    return metrics, failures, again.metrics, other, encoded[:before], raised, infinite
