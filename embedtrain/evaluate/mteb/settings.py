"""How a model directory wants to be used by mteb: prompts for its tasks, and what similarity is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.errors import ModelError
from embedtrain.models.source import ModelSource

_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class MtebSettings:
    """What sentence-transformers would read from the directory as well.

    Attributes:
        prompts: by name: of tasks, of types of task, `query` and `document`.
        default_prompt: put before texts that none of these is for.
        similarity: `cosine` or `dot`.
        note: what was found and is not done, or nothing.
    """

    prompts: Mapping[str, str]
    default_prompt: str
    similarity: str
    note: str = ""


def read_settings(source: ModelSource) -> MtebSettings:
    """Read what the model's directory says beside what its source says.

    Raises:
        ModelError: the file cannot be read.
    """
    said = _said(source)
    default = source.prompts.get(str(said.get("default_prompt_name")), "")
    similarity = said.get("similarity_fn_name") or "cosine"
    if similarity in ("cosine", "dot"):
        return MtebSettings(source.prompts, default, similarity)
    note = f"the model's similarity is {similarity}; texts are compared by cosine all the same"
    return MtebSettings(source.prompts, default, "cosine", note)


def _said(source: ModelSource) -> dict[str, Any]:
    """The settings' file lies beside modules.json: with the backbone, or one folder above."""
    if source.directory is None:
        return {}
    folders = [source.directory, source.directory.parent]
    path = next((folder / _FILE for folder in folders if (folder / "modules.json").is_file()), Path(_FILE))
    try:
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_absolute() and path.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    return said if isinstance(said, dict) else {}
