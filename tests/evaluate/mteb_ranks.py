"""What the ranks do in tests of mteb: a module that does not import it, so that only rank 0 has to."""

from pathlib import Path
from unittest import mock

import pytest

from embedtrain.commands.evaluate import mteb_channel
from embedtrain.commands.evaluate.mteb_client import EvaluatedModel, check_tasks, run_tasks
from embedtrain.config.recipe import Precision
from embedtrain.data.images.files import PICTURES, header_of
from embedtrain.errors import ConfigError, FailedElsewhere
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


def run_pages(world, directory, folder, copies, kind="dense", picture_bytes=1 << 26, pooling=None):
    """Metrics and failures of tasks on copies of their data."""
    config = model_options(kind, path=str(directory), **({"pooling": pooling} if pooling else {}))
    model = load_encoder_model(config, Precision.fp32, world)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=64)
    identity = model_identity(model.source, Precision.fp32, world)
    tasks = []
    if world.is_main:
        from tests.evaluate import page_tasks

        tasks = [page_tasks.page_task(name, path) for name, path in copies.items()]
    with world.fail_together("comparing"):
        check_tasks(tasks, model.tokenizer.layout)
    evaluated = EvaluatedModel(encoder, model.source, str(directory), identity)
    with mock.patch.object(mteb_channel, "_PICTURE_BYTES_PER_COMMAND", picture_bytes):
        results = run_tasks(tasks, evaluated, Console(enabled=False), Path(folder))
    return results.metrics, results.failures


def refused(world, *arguments):
    """The message of the error."""
    with pytest.raises(ConfigError if world.is_main else FailedElsewhere) as caught:
        run_pages(world, *arguments)
    return str(caught.value)


def vectors_of_pages(world, directory, texts, files):
    """Vectors of texts and of pictures, of a model of texts and pictures."""
    model = load_encoder_model(model_options("image_text", path=str(directory)), Precision.fp32, world)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=64)
    headers = [header_of(data) for data in files]
    for header, data in zip(headers, files, strict=True):
        PICTURES.add_bytes(header, data)
    return encoder.encode_all(texts).numpy(), encoder.encode_all([str(header.picture) for header in headers]).numpy()
