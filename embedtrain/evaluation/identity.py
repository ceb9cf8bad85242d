"""What decides about a model's vectors besides the texts, told by the content of its files."""

from pathlib import Path
from typing import Any

from embedtrain.config.schema import Precision
from embedtrain.data.formats.digests import digest_of_file
from embedtrain.distributed.world import World
from embedtrain.models.source import ModelSource

# Weights, configuration, tokenizer, and the code of a model that brings its own.
_ENDINGS = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}


def model_identity(source: ModelSource, precision: Precision, world: World) -> dict[str, Any]:
    """Digests of the model's files by name, and how they are used; the same on every rank. A collective.

    Two models of one identity give the same vectors; what is kept under it can be used again.

    Raises:
        DataError: a file cannot be read.
    """
    files: dict[str, str] = {}
    with world.together("reading the model's files"):
        if world.is_main:
            for number, directory in enumerate(_directories(source)):
                for path in sorted(directory.iterdir()):
                    if path.is_file() and path.suffix in _ENDINGS:
                        files[f"{number}/{path.name}"] = digest_of_file(str(path))
    told: dict[str, Any] = {} if source.include_prompt else {"include_prompt": False}
    return told | {
        "files": world.broadcast(files),
        "pooling": source.pooling.value,
        "normalize": source.normalize,
        "lowercase": source.lowercase,
        "precision": precision.value,
    }


def _directories(source: ModelSource) -> list[Path]:
    return [path for path in (source.directory, *(dense.directory for dense in source.dense)) if path is not None]
