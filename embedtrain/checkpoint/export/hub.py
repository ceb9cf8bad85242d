"""A model directory to the Hugging Face Hub: what has to be there before, and the upload."""

from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode

from embedtrain.config.recipe import ONNX, ExportConfig
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.models.hub import one_line

# Files of an earlier model that are not in the new one: weights in more pieces, a graph that is no longer written.
_REPLACED_FILES = ["*.safetensors", "*.safetensors.index.json", "onnx/*"]


def require_export_support(export: ExportConfig) -> None:
    """Look at the beginning for what an export needs of this machine; in the process that will write it.

    Raises:
        ConfigError: a package is missing, or there is no right to upload.
    """
    if ONNX in export.formats:
        missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"onnx is among the formats to export, and {' and '.join(missing)} cannot be imported: "
                "pip install 'embedtrain[onnx]', or leave onnx out"
            )
    if export.push_to_hub is None:
        return
    if is_offline_mode():
        raise ConfigError(f"push_to_hub={export.push_to_hub}, and HF_HUB_OFFLINE is set: unset it, or leave this out")
    if get_token() is None:
        raise ConfigError(
            f"push_to_hub={export.push_to_hub}, and there is no token of the Hugging Face Hub: set HF_TOKEN, or call "
            "`hf auth login` once"
        )


def upload_model(directory: Path, name: str, *, private: bool, step: int) -> str:
    """Upload a model directory as one commit; the address of the repository.

    Args:
        directory: stays as it is.
        name: id of the repository, made if missing.
        private: whether it is private where it is made.
        step: that the weights are of.

    Raises:
        CheckpointError: the Hub cannot be reached, or refuses.
    """
    api = HfApi()
    try:
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=directory,
            commit_message=f"Model of step {step}",
            delete_patterns=_REPLACED_FILES,
        )
    except Exception as error:  # besides the Hub's own, whatever the transport raises
        raise CheckpointError(
            f"push_to_hub={name} failed ({type(error).__name__}: {one_line(error)}); the model is in {directory}: "
            f"`hf upload {name} {directory}` tries again"
        ) from error
    return str(made)
