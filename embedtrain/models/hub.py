"""Resolves a model path: a local directory, or a snapshot of a repository of the Hugging Face Hub."""

import contextlib
import re
import textwrap
from dataclasses import replace
from pathlib import Path

from huggingface_hub import is_offline_mode, list_repo_files, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ModelConfig
from embedtrain.errors import ConfigError, ModelError
from embedtrain.utils.files import expand_user
from embedtrain.utils.hub import hub_is_reachable, is_local_path

# Files of a Hub repository with the same weights in formats that are never read.
_IGNORED = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.pth", "original/*"]
# Files that describe a model, without its weights and tokenizer.
_CONFIGURATION = [
    "config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*/config.json",
    "*/sentence_*_config.json",
]
_TOKENIZER = ["*.json", "*.txt", "*.model", "*.jinja"]
_PINNED = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)@([\w][\w./-]*)")


def resolve_directory(
    path: str, revision: str | None, option: str, revision_option: str, only: list[str] | None = None
) -> Path:
    """A local directory, or the snapshot of a Hub repository, which is named after its commit.

    `option` and `revision_option` are the names of options in messages; `only` has the patterns of the files to
    download, by default all except unused formats. A ConfigError if a revision is set for a local directory, a
    ModelError if there is no such directory or Hub repository.
    """
    local = expand_user(path)
    if local.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{revision_option}={revision} is for Hub repositories, and {option}={path} is a local directory: "
                "leave it out"
            )
        return local.resolve()
    require_hub_id(path, option, revision)
    hub_is_reachable()
    ignored = list(_IGNORED)
    try:
        if only is None:
            # Without a network the cached snapshot serves, or the next line fails.
            with contextlib.suppress(Exception):
                ignored += _superseded(list_repo_files(path, revision=revision))
        # Offline, huggingface_hub 1.33 asks the network for the files of a commit unless it must not.
        return Path(
            snapshot_download(
                path,
                revision=revision,
                allow_patterns=only,
                ignore_patterns=ignored,
                local_files_only=is_offline_mode(),
            )
        )
    except Exception as error:
        at = "" if revision is None else f" at {revision_option}={revision}"
        if isinstance(error, LocalEntryNotFoundError):
            reason = "without a network (or with HF_HUB_OFFLINE=1)" if is_offline_mode() else "when the Hub fails"
            raise ModelError(
                f"{option}={path}{at} is neither a directory nor in the cache of the Hugging Face Hub, and {reason} it "
                f"cannot be downloaded: set {option} to a local directory, or run once with access to the Hub"
            ) from None
        raise ModelError(
            f"{option}={path}{at} is neither a directory nor a model available from the Hugging Face Hub "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None


def _superseded(names: list[str]) -> list[str]:
    """The pickles in folders with safetensors: a dense head of an old model may have a pickle only."""
    folders = {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}
    return [name for name in names if name.endswith(".bin") and name.rpartition("/")[0] in folders]


def download_configuration(model: ModelConfig) -> ModelConfig:
    """Replace a Hub id by a directory with the configuration files of its repository.

    Those of the tokenizer are among them for a cross-encoder, whose chat template may have its prompts.
    """
    if model.path is None or model.config is not None or expand_user(model.path).is_dir():
        return model
    patterns = [*_CONFIGURATION, *(["*.py"] if model.trust_remote_code else [])]
    if load_kind(model.kind).scores_pairs:
        patterns += _TOKENIZER
    directory = resolve_directory(model.path, model.revision, "model.path", "model.revision", patterns)
    return replace(model, path=str(directory), revision=None)


def require_hub_id(path: str, option: str, revision: str | None = None) -> None:
    """Raise ModelError for a path that is no directory and that cannot be the id of a repository either."""
    local = expand_user(path)
    if local.exists():
        raise ModelError(f"{option}={path}: no such folder (it is a file)")
    if is_local_path(path) and (revision is None or path.count("/") != 1):
        hint = f" (if it is a Hub id, not a folder in {local.parent}, name its revision)" if is_id(path) else ""
        raise ModelError(f"{option}={path}: no such folder{hint}")


def is_id(path: str) -> bool:
    """Whether a path has the form `owner/name`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def split_revision(path: str) -> tuple[str, str | None]:
    """The id and the revision of `owner/name@revision`; a local path, or an id without a revision, has None."""
    match = _PINNED.fullmatch(path)
    if match is None or expand_user(path).exists():
        return path, None
    return match[1], match[2]
