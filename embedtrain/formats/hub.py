"""Models of the Hugging Face Hub: a path becomes a local directory, and an export a repository."""

import contextlib
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, is_offline_mode, list_repo_files, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ONNX, OPENVINO, ExportConfig, ModelConfig
from embedtrain.config.validation import model_option
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.export_record import RECORD
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import install_command, one_line
from embedtrain.utils.hub import hub_is_reachable, is_local_path

# Files of a Hub repository with the same weights in formats that are never read.
_IGNORED = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.pth", "original/*"]
# Files that describe a model, without its weights and tokenizer.
_CONFIGURATION = [
    "config.json",
    "modules.json",
    "router_config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*/config.json",
    "*/sentence_*_config.json",
]
_TOKENIZER = ["*.json", "*.txt", "*.model", "*.jinja"]
_PINNED = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)@([\w][\w./-]*)")
# Files of an earlier model to delete if the new one lacks them: more weight files, an ONNX graph.
_REPLACED_FILES = ["*.safetensors", "*.safetensors.index.json", "onnx/*", "openvino/*"]
# What formats need besides the dependencies of the package, which has an extra of the same name.
_PACKAGES = {ONNX: ("onnx", "onnxruntime"), OPENVINO: ("openvino",)}


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
    if model.config is not None:
        return model
    kind = load_kind(model.kind)
    patterns = [*_CONFIGURATION, *(["*.py"] if model.trust_remote_code else [])]
    if kind.scores_pairs:
        patterns += _TOKENIZER

    def downloaded(part: Any) -> Any:
        if part.path is None or expand_user(part.path).is_dir():
            return part
        names = model_option("path"), model_option("revision")
        return replace(part, path=str(resolve_directory(part.path, part.revision, *names, patterns)), revision=None)

    described: ModelConfig = kind.with_models(model, downloaded)
    return described


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


def split_revision(path: str) -> tuple[str, str | None]:
    """The id and the revision of `owner/name@revision`; a local path, or an id without a revision, has None."""
    match = _PINNED.fullmatch(path)
    if match is None or expand_user(path).exists():
        return path, None
    return match[1], match[2]


def require_export_support(export: ExportConfig) -> None:
    """Raise ConfigError if a package that an export needs is missing here, or the Hub cannot be used."""
    for name, packages in _PACKAGES.items():
        missing = [package for package in packages if find_spec(package) is None]
        if name in export.formats and missing:
            raise ConfigError(
                f"export.formats includes {name}, but {' and '.join(missing)} cannot be imported: "
                f"{install_command(name)}, or leave {name} out"
            )
    if export.push_to_hub is None:
        return
    if is_offline_mode():
        raise ConfigError(f"push_to_hub={export.push_to_hub}, but HF_HUB_OFFLINE is set: unset it, or omit this option")
    if get_token() is None:
        raise ConfigError(
            f"push_to_hub={export.push_to_hub}, but there is no token for the Hugging Face Hub: set HF_TOKEN, or run "
            "`hf auth login` once"
        )


def upload_model(directory: Path, name: str, *, private: bool, step: int | None = None) -> str:
    """Upload a model directory to the repository `name` in one commit; returns the repository's address.

    `step` is that of a run; None: the model was merged. A missing repository is created. Raises
    CheckpointError if the Hub cannot be reached, or rejects the upload.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=directory,
            commit_message="Merged model" if step is None else f"Model of step {step}",
            delete_patterns=_REPLACED_FILES,
            ignore_patterns=[RECORD],
        )
    except Exception as error:  # the Hub's own, and whatever the transport raises
        raise CheckpointError(
            f"push_to_hub={name} failed ({type(error).__name__}: {one_line(error)}); the model is in {directory}: "
            f"retry with `hf upload {name} {directory}`"
        ) from error
    return str(repository)
