"""Where a model's files lie: a directory here, or a snapshot of a repository of the Hugging Face Hub."""

import re
import textwrap
from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download

from embedtrain.errors import ConfigError, ModelError

# Files of a Hub repository that hold the same weights in formats nobody here reads.
_NEVER_DOWNLOADED = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.pth", "original/*"]
_PINNED = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)@([\w][\w./-]*)")


def resolve_directory(
    path: str, revision: str | None, option: str, revision_option: str, only: list[str] | None = None
) -> Path:
    """The directory that a path means, or the snapshot of a Hub repository; it is named after its commit.

    Args:
        path: directory or Hub id.
        revision: commit, tag or branch of the Hub repository.
        option: what the path is called where the user wrote it.
        revision_option: what the revision is called there.
        only: patterns of the files that are wanted; None: all but formats that nobody here reads.

    Raises:
        ConfigError: a revision of a directory.
        ModelError: no such directory or Hub repository.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{revision_option}={revision} chooses a version of a Hub repository, and {option}={path} is a "
                "directory here: leave it out"
            )
        return local.resolve()
    if local.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"{option}={path}: there is no such directory")
    ignored = list(_NEVER_DOWNLOADED)
    try:
        try:
            if only is None and any(name.endswith(".safetensors") for name in list_repo_files(path, revision=revision)):
                ignored.append("*.bin")
        except Exception:  # noqa: S110 - any transport's own; the cached snapshot serves, or the next line tells
            pass
        return Path(snapshot_download(path, revision=revision, allow_patterns=only, ignore_patterns=ignored))
    except Exception as error:
        at = "" if revision is None else f" at {revision_option}={revision}"
        raise ModelError(
            f"{option}={path}{at} is neither a directory nor a model that the Hugging Face Hub gave us "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def split_revision(path: str) -> tuple[str, str | None]:
    """The id and the revision of `owner/name@revision`; a local path, or an id without a revision, has None."""
    match = _PINNED.fullmatch(path)
    if match is None or Path(path).expanduser().exists():
        return path, None
    return match[1], match[2]
