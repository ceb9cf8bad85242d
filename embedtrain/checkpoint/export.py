"""Export: write a model directory, reopen it with sentence-transformers, and compare its vectors.

A directory that the library it is for opens to other vectors than the encoder's is worse than none, so an
export that does not match fails, and leaves nothing under the name that was asked for.
"""

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from embedtrain.checkpoint.directory import (
    DTYPES,
    LARGEST_FILE,
    Piece,
    WeightPlan,
    begin_model,
    plan_weights,
    untrained_pieces,
    write_weights,
)
from embedtrain.checkpoint.snapshot import ENCODER, parts_of, share_of
from embedtrain.checkpoint.stored import StoredTensors
from embedtrain.checkpoint.weight_files import TensorSpec
from embedtrain.config.schema import ExportDtype
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.models.build import build_encoder, stored_dtype
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


@dataclass(frozen=True, slots=True)
class Export:
    """A model directory in the making: begun by one process, written by all, finished by one.

    Attributes:
        to: replaced if it exists, once the new one has passed.
        architecture: written by `write_architecture`.
        plan: where weights go; the same in every process.
        dtype: what weights are stored in.
    """

    to: Path
    architecture: Path
    plan: WeightPlan
    dtype: torch.dtype

    @property
    def unfinished(self) -> Path:
        """Where it is written."""
        return self.to.with_name(self.to.name + ".tmp")

    def begin(self) -> None:
        """Make the directory without weights; in one process.

        Raises:
            OSError: it cannot be written.
        """
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.to.parent.mkdir(parents=True, exist_ok=True)
        begin_model(self.unfinished, self.architecture, self.plan, self.dtype)

    def write(self, pieces: Iterable[Piece], *, main: bool) -> None:
        """Write what this process has of the weights, once the directory is there.

        Args:
            pieces: the encoder's name of a weight, its first row, and rows.
            main: whether this is the process that begins and finishes.

        Raises:
            CheckpointError: a weight is too large for the type it is to be stored in.
            OSError: the directory cannot be written.
        """
        added = untrained_pieces(self.architecture) if main else ()
        write_weights(self.unfinished, self.plan, itertools.chain(pieces, added), begins=main)

    def finish(self, card: str, *, expected: Tensor, tolerance: float, trust_remote_code: bool = False) -> Exported:
        """Reopen the directory, compare, and give it its name; in one process, when all have written.

        Args:
            card: text of the model card.
            expected: the encoder's own vectors of PROBES without prompts, [len(PROBES), D].
            tolerance: largest relative difference of a vector that passes.
            trust_remote_code: whether the model's own Python may run when it is reopened.

        Raises:
            CheckpointError: sentence-transformers cannot open the directory or gets other vectors from it.
            OSError: it cannot be written.
        """
        (self.unfinished / "README.md").write_text(card, encoding="utf-8")
        found = reopened_vectors(self.unfinished, trust_remote_code=trust_remote_code)
        difference = largest_difference(found, expected)
        if not difference <= tolerance:  # also true of NaN
            raise CheckpointError(
                f"export to {self.to} failed: sentence-transformers opens {self.unfinished} but its vectors differ "
                f"from the encoder's by {difference:.1e} (allowed {tolerance:.0e}); the directory is left there to look at"
            )
        shutil.rmtree(self.to, ignore_errors=True)
        self.unfinished.rename(self.to)
        return Exported(self.to, difference)


def plan_export(
    to: Path, architecture: Path, specs: Mapping[str, TensorSpec], dtype: torch.dtype, largest: str = LARGEST_FILE
) -> Export:
    """An export of an encoder whose weights have these types and shapes (`backbone.*`, `dense.<index>.*`)."""
    return Export(to, architecture, plan_weights(architecture, specs, dtype, largest), dtype)


def live_pieces(encoder: Encoder) -> tuple[dict[str, TensorSpec], Iterator[Piece]]:
    """Of a sharded encoder: all weights' types and shapes, and the rows that this rank is to write."""
    state = cast("dict[str, Tensor]", get_model_state_dict(encoder))
    share, parts = share_of(state), parts_of(state)
    mine = (
        (name, part.first, part.rows)
        for name, part in parts.items()
        if share.writes and (part.cut or share.shard == 0) and part.rows.numel()
    )
    return {name: part.spec for name, part in parts.items()}, mine


def stored_pieces(stored: StoredTensors) -> tuple[dict[str, TensorSpec], Iterator[Piece]]:
    """Of a checkpoint: all the encoder's types and shapes, and all rows, part by part as they lie."""
    names = [name for name in stored.specs if name.startswith(ENCODER)]
    pieces = ((name.removeprefix(ENCODER), first, rows) for name in names for first, rows in stored.parts(name))
    return {name.removeprefix(ENCODER): stored.specs[name] for name in names}, pieces


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Of vectors [N, D] from those expected, relative to these; NaN where one is."""
    expected = expected.float().cpu()
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


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


def stored_encoder(source: ModelSource, stored: StoredTensors) -> Encoder:
    """An encoder in this process's memory with a checkpoint's weights.

    Raises:
        CheckpointError: the weights are not this model's.
    """
    encoder = build_encoder(source)
    specs, pieces = stored_pieces(stored)
    state = encoder.state_dict()
    for name in sorted(state.keys() ^ specs.keys()):
        raise CheckpointError(f"{stored.folder} does not fit the model: {name} is in one of them alone")
    encoder._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t
    )
    state = encoder.state_dict()
    for name, first, rows in pieces:
        if tuple(state[name].shape) != specs[name].shape:
            raise CheckpointError(
                f"{stored.folder} does not fit the model: {name} has the shape {list(specs[name].shape)}, the model's "
                f"{list(state[name].shape)}"
            )
        (state[name] if not rows.dim() else state[name][first : first + len(rows)]).copy_(rows)
    return encoder


def export_dtype(asked: ExportDtype, source: ModelSource) -> torch.dtype:
    """The torch type for `export.dtype`."""
    return stored_dtype(source) if asked is ExportDtype.source else DTYPES[asked]


def tolerance_of(dtype: torch.dtype, *, exact_encoder: bool) -> float:
    """How far apart vectors may be: rounding of stored weights, and of a bf16 encoder's own arithmetic."""
    if dtype == torch.float32:
        return 1e-4 if exact_encoder else 5e-2
    return 2e-2 if dtype == torch.float16 and exact_encoder else 8e-2
