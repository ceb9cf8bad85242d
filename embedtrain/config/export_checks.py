"""What is asked of an export, and what of it cannot work, found before anything is written."""

import math
import re

from embedtrain.config.recipe import ExportConfig
from embedtrain.errors import ConfigError

ONNX, ADAPTER = "onnx", "adapter"
EXPORT_FORMATS = ("sentence_transformers", ONNX, ADAPTER)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(KB|MB|GB|TB)")


def check_export(export: ExportConfig, prefix: str = "") -> None:
    """Refuse what cannot work.

    Args:
        export: the options.
        prefix: of their names where the user writes them.

    Raises:
        ConfigError: an unknown format, a size that is none, or a repository's name that the Hub does not take.
    """
    for name in export.formats:
        if name not in EXPORT_FORMATS:
            raise ConfigError(f"{prefix}formats={export.formats}: allowed is {', '.join(EXPORT_FORMATS)}")
    size = _SIZE.fullmatch(export.max_file_size.strip().upper())
    if size is None or not math.isfinite(float(size[1])) or float(size[1]) <= 0:
        raise ConfigError(
            f"{prefix}max_file_size={export.max_file_size}: a number above 0 with KB, MB, GB or TB, such as 5GB"
        )
    if export.push_to_hub is not None and not is_repository_name(export.push_to_hub):
        raise ConfigError(
            f"{prefix}push_to_hub={export.push_to_hub}: the id of a repository on the Hub, such as my-name/my-model, "
            "of letters, digits, -, _ and ."
        )


def is_repository_name(name: str) -> bool:
    """Whether the Hub takes it as the id of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
