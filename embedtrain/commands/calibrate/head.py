"""The affine head of a sample of vectors, and the model directory that contains it.

Shapes: n vectors, D dimensions before the head, K after it.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from threadpoolctl import threadpool_limits
from torch import Tensor

from embedtrain.config.kinds import Kind
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.export_record import RECORD, write_record
from embedtrain.formats.sentence_transformers import read_directory_modules
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import remove_code
from embedtrain.inference.principal_components import principal_components
from embedtrain.inference.quantised import QUANTISATION_FILE, write_ranges
from embedtrain.losses.quantisation import Ranges
from embedtrain.models.file_references import require_own_file
from embedtrain.models.pooling import pooling_name
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

_DENSE = "sentence_transformers.models.Dense"
_IDENTITY = "torch.nn.modules.linear.Identity"
# Graphs of the model without the head would be other models.
_NOT_COPIED = (RECORD, QUANTISATION_FILE, "onnx", "openvino", ".cache", ".git")


@dataclass(frozen=True, slots=True)
class AffineHead:
    """y = weight x + bias."""

    weight: Tensor  # float32 [K, D]
    bias: Tensor  # float32 [K]
    explained: float  # fraction of the sample's variance in the K dimensions

    def apply(self, vectors: Tensor) -> Tensor:
        """[n, D] -> float32 [n, K]."""
        return (vectors.double() @ self.weight.double().T + self.bias.double()).float()


def fit_head(vectors: Tensor, dims: int | None, *, rotates: bool) -> AffineHead:
    """The head of a sample [n, D] of vectors before normalisation. The same bits on any machine load.

    It subtracts the mean, and with `rotates` it rotates to the first `dims` principal components.

    The mean and the covariance are computed in float64 on one thread: libraries add in another order with another
    number of threads.
    """
    sample = vectors.double().cpu().numpy()
    with threadpool_limits(limits=1):
        mean = sample.mean(axis=0)
        if not rotates:
            return _head(np.eye(len(mean)), mean, 1.0)
        centred = sample - mean
        components, values = principal_components(centred.T @ centred / len(sample))
        count = dims or len(mean)
        explained = float(values[:count].sum() / max(float(values.sum()), 1e-300))
        return _head(components[:count].numpy(), mean, explained)


def _head(weight: NDArray[np.float64], mean: NDArray[np.float64], explained: float) -> AffineHead:
    bias = -(weight @ mean)
    return AffineHead(torch.from_numpy(weight.copy()).float(), torch.from_numpy(bias).float(), explained)


def ranges_of(vectors: Tensor) -> Ranges:
    """Ranges of vectors [n, K] that are compared."""
    return Ranges(vectors.amin(dim=0), vectors.amax(dim=0))


def require_calibratable(source: ModelSource, model: str) -> None:
    """Raise ConfigError if the model truncates its vectors."""
    if source.vectors.truncate_dim is not None:
        raise ConfigError(
            f"model={model}: its settings truncate vectors to {source.vectors.truncate_dim} dimensions "
            "(truncate_dim), and a head needs all; calibrate the model before it is truncated"
        )


def require_copyable(model: Path) -> None:
    """Raise ModelError if a directory has links out of it: what they lead to would be published with the copy."""
    for path in sorted(model.rglob("*")):
        require_own_file(path, model)
        if path.is_symlink() and path.is_dir():
            raise ModelError(f"{path} is a link to a folder, which would be copied: replace it by a copy")
        if not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is no file that can be copied: remove it")


def require_stored_pooling(source: ModelSource, root: Path) -> None:
    """Raise ConfigError unless the vectors are pooled as the directory says, which is copied."""
    stored = read_directory_modules(root).pooling if (root / "modules.json").is_file() else None
    if source.vectors.pooling != stored:
        what = "no pooling" if stored is None else f"the pooling {pooling_name(stored)}"
        raise ConfigError(
            f"pooling={pooling_name(source.vectors.pooling)}: the new directory has the modules of {root}, which "
            f"define {what}; leave it out, or save the model with this pooling first"
        )


def write_directory(
    directory: Path,
    model: Path,
    head: AffineHead | None,
    ranges: Mapping[int, Ranges],
    origin: Mapping[str, Any],
    *,
    kind: Kind,
    trust_remote_code: bool,
) -> None:
    """Copy a model directory of a `kind` and add the head, before the normalisation, and the ranges.

    Raises ModelError if it has links out of it, or the new directory cannot be opened.
    """
    require_copyable(model)
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    if not trust_remote_code:
        remove_code(directory)
    if head is not None:
        _add_head(directory, head)
    write_ranges(directory / QUANTISATION_FILE, ranges, origin)
    write_record(directory)
    open_model_source(kind.model_options(path=str(directory), trust_remote_code=trust_remote_code))


def _add_head(directory: Path, head: AffineHead) -> None:
    modules: list[dict[str, Any]] = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    is_normalize = [str(module["type"]).endswith(".Normalize") for module in modules]
    position = is_normalize.index(True) if any(is_normalize) else len(modules)
    number = position
    while (directory / f"{number}_Dense").exists():
        number += 1
    folder = directory / f"{number}_Dense"
    folder.mkdir()
    num_out, num_in = head.weight.shape
    settings = {"in_features": num_in, "out_features": num_out, "bias": True, "activation_function": _IDENTITY}
    write_json(folder / "config.json", settings)
    (folder / "model.safetensors").write_bytes(save({"linear.weight": head.weight, "linear.bias": head.bias}))
    modules.insert(position, {"path": folder.name, "type": _DENSE})
    entries = [module | {"idx": index, "name": str(index)} for index, module in enumerate(modules)]
    write_json(directory / "modules.json", entries)
