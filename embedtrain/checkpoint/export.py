"""Export: write a model directory, reopen it with sentence-transformers, and compare its vectors.

A directory that the library it is for opens to other vectors than the encoder's is worse than none, so an
export that does not match fails, and leaves nothing under the name that was asked for.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embedtrain.checkpoint.directory import DTYPES, write_model
from embedtrain.config.schema import ExportDtype
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.models.build import assemble, stored_dtype
from embedtrain.models.encoder import Encoder
from embedtrain.models.source import ModelSource

# Short, long, several scripts, nothing but signs: what tokenisers and pooling stumble over.
PROBES = (
    "a",
    "What is the capital of France?",
    "如何在多个 GPU 上训练向量模型？",
    "Die Straße ist naß, naïve café, 東京タワー, Привет, мир, مرحبا",
    "1234 + 5678 = 6912; #!?",
    " ".join(f"A longer text is cut where the model's length ends, sentence {i}." for i in range(200)),
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how far its vectors are from the encoder's (largest relative difference)."""

    directory: Path
    difference: float


def export_model(
    to: Path,
    architecture: Path,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    expected: Tensor,
    tolerance: float,
    card: str,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the directory `to` and compare it with the encoder. For one process.

    Args:
        to: replaced if it exists, once the new one has passed.
        architecture: written by `write_architecture`.
        state: the encoder's whole state dict.
        dtype: what weights are stored in.
        expected: the encoder's own vectors of PROBES without prompts, [len(PROBES), D].
        tolerance: largest relative difference of a vector that passes.
        card: text of the model card.
        trust_remote_code: whether the model's own Python may run when it is reopened.

    Raises:
        CheckpointError: sentence-transformers cannot open the directory or gets other vectors from it.
    """
    unfinished = to.with_name(to.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_model(unfinished, architecture, state, dtype)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        found = reopened_vectors(unfinished, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise CheckpointError(f"export to {to} failed: {error.strerror or error} ({error.filename})") from error
    expected = expected.float().cpu()
    difference = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
    if not difference <= tolerance:  # also true of NaN
        raise CheckpointError(
            f"export to {to} failed: sentence-transformers opens {unfinished} but its vectors differ from the "
            f"encoder's by {difference:.1e} (allowed {tolerance:.0e}); the directory is left there to look at"
        )
    shutil.rmtree(to, ignore_errors=True)
    unfinished.rename(to)
    return Exported(to, difference)


def reopened_vectors(directory: Path, *, trust_remote_code: bool = False) -> Tensor:
    """The vectors of PROBES by sentence-transformers from a model directory, float32 [len(PROBES), D]."""
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(
            str(directory),
            device="cpu",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": "float32"},
        )
        # prompt="" because a default prompt is the library's affair; the encoder's probes have none.
        vectors = model.encode(list(PROBES), prompt="", convert_to_tensor=True, show_progress_bar=False)
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot open {directory}: {type(error).__name__}: {error}"
        ) from error
    return torch.as_tensor(vectors).float().cpu()


def require_replaceable(to: Path, run_dir: Path) -> Path:
    """The directory to export to, if nothing but an earlier export would be replaced.

    Raises:
        ConfigError: it is a file, it holds the run, or it is a folder with something else in it.
    """
    to = to.expanduser()
    if to.exists() and not to.is_dir():
        raise ConfigError(f"to={to} is a file: name a folder, which will be made")
    if run_dir.resolve().is_relative_to(to.resolve()):
        raise ConfigError(f"to={to} holds the run itself: name a folder of its own")
    if to.is_dir() and any(to.iterdir()) and not (to / "modules.json").is_file():
        raise ConfigError(f"to={to} holds something else than a model: name a new folder, or an earlier export")
    return to if to.name else to.resolve()  # "." has no name to put an ending to


def plain_vectors(encoder: Encoder, tokenizer: TextTokenizer) -> Tensor:
    """The vectors of PROBES by an encoder that lies whole in this process, each text alone."""
    ids = tokenizer.ids(PROBES)
    with torch.no_grad():
        chunks = [tokenizer.pad(ids, [row]) for row in range(len(ids))]
        return torch.cat([encoder.eval()(chunk.ids, chunk.mask) for chunk in chunks])


def whole_encoder(source: ModelSource, state: Mapping[str, Tensor]) -> Encoder:
    """An encoder in this process with the given weights.

    Raises:
        CheckpointError: the weights are not this model's.
    """
    encoder = assemble(source)
    try:
        encoder.load_state_dict(dict(state))
    except RuntimeError as error:
        raise CheckpointError(f"the weights do not fit the model: {str(error).splitlines()[-1].strip()}") from None
    return encoder


def export_dtype(asked: ExportDtype, source: ModelSource) -> torch.dtype:
    """The torch type for `export.dtype`."""
    return stored_dtype(source) if asked is ExportDtype.source else DTYPES[asked]


def tolerance_of(dtype: torch.dtype, *, exact_encoder: bool) -> float:
    """How far apart vectors may be: rounding of stored weights, and of a bf16 encoder's own arithmetic."""
    if dtype == torch.float32:
        return 1e-4 if exact_encoder else 5e-2
    return 2e-2 if dtype == torch.float16 and exact_encoder else 8e-2
