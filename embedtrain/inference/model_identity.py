"""What a model's vectors depend on: the content of its files, and how they are used."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World
from embedtrain.inference.stored_vectors import SIMILARITY
from embedtrain.models.export_record import DESCRIPTIONS
from embedtrain.models.types import ModelSource
from embedtrain.utils.checksums import Checksums

# Raised when the vectors of the same files change by more than rounding.
_VERSION = 1
# Files beside a model that none of its loaders reads: cards, weights of other libraries, and states of a training.
_NOT_READ = {".md", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".png", ".jpg", ".pdf", ".log"}
_NOT_READ_NAMES = {*DESCRIPTIONS, "training_args.bin", "optimizer.pt", "scheduler.pt", "trainer_state.json"}


def model_identity(
    source: ModelSource, precision: Precision, world: World, graph: Path | None = None
) -> dict[str, Any]:
    """What a model's vectors depend on: checksums of its files, and how they are used. A collective.

    Two models with the same identity give the same vectors, wherever their files are. `graph` is the file that computes
    them instead of the model's own code.
    """
    found: list[tuple[str, str]] = []
    with world.fail_together("listing the model's files"):
        if world.is_main:
            found = [(name, str(path)) for name, path in sorted(_files(source, graph).items())]
    files: dict[str, list[str]] = {}
    found = world.broadcast(found)
    with world.fail_together("reading the model's files"):
        for name, path in found[world.rank :: world.size]:
            files[name] = Checksums.of(Path(path)).files["."][1]
    # In the order of their names, which does not depend on the number of ranks: folders hold these bytes.
    contents = dict(sorted((name, blocks) for of_rank in world.gather(files) for name, blocks in of_rank.items()))
    options: dict[str, Any] = {} if source.include_prompt else {"include_prompt": False}
    if source.truncate_dim is not None:
        options["truncate_dim"] = source.truncate_dim
    if source.kind.name == "late_interaction":  # a dense model may have the same files
        options[SIMILARITY] = source.settings.similarity.value
        options["token_vectors"] = {name: str(value) for name, value in asdict(source.settings).items()}
    elif source.similarity is not VectorSimilarity.cosine:
        options[SIMILARITY] = source.similarity.value
    if source.kind.name == "sparse":  # likewise
        options["words"] = [source.settings.pooling.value, source.settings.activation.value]
    return options | {
        "files": contents,
        "version": _VERSION,
        # Models are computed by its code, which minor versions correct.
        "transformers": ".".join(transformers.__version__.split(".")[:2]),
        "kind": source.kind.name,
        "pooling": source.pooling.value,
        "normalize": source.normalize,
        "lowercase": source.tokenization.lowercase,
        "precision": precision.value,
    }


def _files(source: ModelSource, graph: Path | None) -> dict[str, Path]:
    """The files that are read, by the part of the model that they belong to and their names."""
    parts = {str(number): dense.directory for number, dense in enumerate(source.dense, 1)}
    files: dict[str, Path] = {}
    for part, directory in ({"0": source.directory, "adapter": source.adapter} | parts).items():
        if directory is not None:
            files |= {f"{part}/{path.name}": path for path in directory.iterdir() if _is_read(path)}
    if source.directory is not None and source.trust_remote_code:
        code = (path for path in source.directory.rglob("*.py") if path.is_file())
        files |= {f"0/{path.relative_to(source.directory).as_posix()}": path for path in code}
    if graph is not None:  # its external data are beside it
        beside = (path for path in graph.parent.iterdir() if path.is_file() and path.name.startswith(graph.stem))
        files |= {f"graph/{path.name}": path for path in beside}
    return files


def _is_read(path: Path) -> bool:
    return (
        path.suffix not in _NOT_READ
        and path.name not in _NOT_READ_NAMES
        and not path.name.startswith(".")
        and path.is_file()
    )
