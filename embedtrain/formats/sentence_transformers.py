"""Opens an exported directory with sentence-transformers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedtrain.errors import CheckpointError
from embedtrain.models.types import ModelSource

# Texts that it encodes at a time. It sorts them by length, but more of them would all be padded to the longest probe
# text; with one of them, padding would not be tested.
BATCH_SIZE = 2


def load_model(class_name: str, directory: Path, source: ModelSource) -> Any:
    """The model of a directory as a class of sentence-transformers, in float32 on the CPU.

    Raises whatever the library raises.
    """
    import sentence_transformers  # only here, because it takes seconds

    return getattr(sentence_transformers, class_name)(
        str(directory),
        device="cpu",
        local_files_only=True,
        trust_remote_code=source.trust_remote_code,
        model_kwargs={"dtype": "float32"},
    )


@contextlib.contextmanager
def opening(directory: Path) -> Iterator[None]:
    """Turn an exception of the library into a CheckpointError that names the directory."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot open {directory}: {type(error).__name__}: {error}"
        ) from error
