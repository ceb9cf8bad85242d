"""Upload of a model directory to the Hugging Face Hub, and its prerequisites."""

from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode

from embedtrain.config.recipe import ONNX, OPENVINO, ExportConfig
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.models.export_record import RECORD
from embedtrain.models.hub import one_line
from embedtrain.utils.formatting import install_command

# Files of an earlier model to delete if the new one lacks them: more weight files, an ONNX graph.
_REPLACED_FILES = ["*.safetensors", "*.safetensors.index.json", "onnx/*", "openvino/*"]


# What formats need besides the dependencies of the package, which has an extra of the same name.
_PACKAGES = {ONNX: ("onnx", "onnxruntime"), OPENVINO: ("openvino",)}


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
