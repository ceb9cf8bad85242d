"""Export: write a model directory, reopen it with every library it is for, and compare its vectors.

A directory that a library it is for opens to other vectors than the encoder's is worse than none, so an
export that does not match fails, and leaves nothing under the name that was asked for.
"""

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from embedtrain.checkpoint.export.adapters import copy_adapter_config, live_merged_weights
from embedtrain.checkpoint.export.model_directory import (
    ADAPTER_FOLDER,
    DTYPES,
    WeightPlan,
    WeightRows,
    WeightStream,
    create_model_directory,
    plan_weights,
    pooler_rows,
    write_weights,
)
from embedtrain.checkpoint.export.onnx import check_graph, write_graph
from embedtrain.checkpoint.export.probes import ExportReference
from embedtrain.checkpoint.export.reopen import (
    AdapterBase,
    check_adapter,
    check_sentence_transformers,
    check_transformers,
    require_shapes,
)
from embedtrain.checkpoint.index import TensorReader
from embedtrain.checkpoint.snapshot import ENCODER, local_shards, shard_position
from embedtrain.config.recipe import ADAPTER, ONNX, ExportConfig, ExportDtype
from embedtrain.errors import CheckpointError, ConfigError, EmbedtrainError
from embedtrain.models.adapters import has_adapters
from embedtrain.models.build import build_encoder, stored_dtype
from embedtrain.models.encoder import Encoder
from embedtrain.models.source import ModelSource

_LOCK_TIMEOUT = 10.0  # seconds that an export waits for another one to the same directory


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written, and how far its vectors are from the encoder's: the largest relative difference.

    None where nobody has looked.
    """

    directory: Path
    difference: float | None
    dtype: torch.dtype

    @property
    def told(self) -> str:
        """In words."""
        same = "not compared" if self.difference is None else "vectors equal the encoder's"
        return f"{str(self.dtype).removeprefix('torch.')}, {same}"


@dataclass(frozen=True, slots=True)
class ModelExport:
    """A model directory in the making: begun by one process, written by all, finished by one.

    Attributes:
        to: replaced if it exists, once the new one has passed.
        architecture: written by `write_architecture`.
        plan: where weights go; the same in every process.
        dtype: what weights are stored in.
        formats: what is written besides.
        settings: folder with the configuration of the adapter that is written besides.
        base: what that adapter was trained on.
    """

    to: Path
    architecture: Path
    plan: WeightPlan
    dtype: torch.dtype
    formats: tuple[str, ...] = ()
    settings: Path | None = None
    base: AdapterBase | None = None

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
        create_model_directory(self.unfinished, self.architecture, self.plan, self.dtype)
        if self.settings is not None:
            copy_adapter_config(self.settings, self.unfinished / ADAPTER_FOLDER)

    def write(self, pieces: Iterable[WeightRows], *, main: bool) -> None:
        """Write what this process has of the weights, once the directory is there.

        Args:
            pieces: the encoder's name of a weight, its first row, and rows.
            main: whether this is the process that begins and finishes.

        Raises:
            CheckpointError: a weight is too large for the type it is to be stored in.
            OSError: the directory cannot be written.
        """
        added = pooler_rows(self.architecture) if main else ()
        wanted = (piece for piece in itertools.chain(pieces, added) if piece[0] in self.plan.places)
        write_weights(self.unfinished, self.plan, wanted, begins=main)

    def finish(
        self,
        card: str,
        expected: ExportReference | None,
        *,
        trust_remote_code: bool = False,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> ExportResult:
        """Reopen the directory, compare, and give it its name; in one process, when all have written.

        Args:
            card: text of the model card.
            expected: what the directory has to be like; None leaves out all that needs the model in memory, but for
                an ONNX graph that is asked for.
            trust_remote_code: whether the model's own Python may run when it is reopened.
            phase: shows what is going on while a block runs.

        Raises:
            CheckpointError: a library it is for cannot open the directory, or gets other vectors from it; it is left
                under its unfinished name.
            OSError: it cannot be written.
        """
        directory = self.unfinished
        (directory / "README.md").write_text(card, encoding="utf-8")
        differences = [0.0]
        try:
            source = require_shapes(directory, trust_remote_code=trust_remote_code)
            if expected is not None:
                with phase("reopening it with transformers"):
                    differences.append(check_transformers(directory, source, expected))
                with phase("reopening it with sentence-transformers"):
                    differences.append(check_sentence_transformers(directory, source, expected))
                if self.settings is not None and self.base is not None:
                    with phase("reopening the adapter with PEFT"):
                        differences.append(check_adapter(directory / ADAPTER_FOLDER, self.base, source, expected))
            if ONNX in self.formats:
                with phase("writing an ONNX graph"):
                    traced = write_graph(directory, source)
                if expected is not None:
                    with phase("reopening it with onnxruntime"):
                        differences.append(check_graph(directory, source, traced))
        except EmbedtrainError as error:
            raise CheckpointError(
                f"export to {self.to} failed, and is left as {directory} to look at: {error}"
            ) from error
        _replace(self.to, directory)
        return ExportResult(self.to, None if expected is None else max(differences), self.dtype)


@contextmanager
def export_lock(to: Path) -> Iterator[None]:
    """Keep others from exporting to the same directory meanwhile.

    The lock is the operating system's: an export that is killed holds it no longer.

    Raises:
        ConfigError: another export to it is under way.
        OSError: the folder that it is to lie in cannot be written.
    """
    path = to.with_name(to.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=_LOCK_TIMEOUT):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # whoever waits for it sees that, and makes a new one (filelock >= 4.2)
    except Timeout:
        raise ConfigError(f"another export to {to} is under way: wait for it, or name another folder") from None


def _replace(to: Path, by: Path) -> None:
    """Give a directory its name; the one that had it is out of the way before it is deleted."""
    old = to.with_name(to.name + ".old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if to.exists():
        to.rename(old)
    by.rename(to)
    shutil.rmtree(old, ignore_errors=True)


def plan_export(
    to: Path,
    architecture: Path,
    pieces: WeightStream,
    dtype: torch.dtype,
    asked: ExportConfig,
    *,
    settings: Path | None = None,
    base: AdapterBase | None = None,
) -> ModelExport:
    """An export of an encoder whose weights have the types and shapes of these pieces.

    Args:
        to: see Export.
        architecture: likewise.
        pieces: `backbone.*`, `dense.<index>.*`.
        dtype: what weights are stored in.
        asked: the recipe's options.
        settings: folder with the adapter's configuration, if it has one.
        base: what the adapter was trained on.
    """
    formats = tuple(asked.formats)
    adapter = pieces.adapter if ADAPTER in formats else {}
    plan = plan_weights(architecture, pieces.specs, dtype, asked.max_file_size, adapter)
    return ModelExport(to, architecture, plan, dtype, formats, settings if adapter else None, base)


def live_weights(encoder: Encoder) -> WeightStream:
    """Of a sharded encoder: all weights' types and shapes, and the rows that this rank is to write.

    A collective where there are adapters: they are merged.
    """
    if has_adapters(encoder):
        return live_merged_weights(encoder)
    state = cast("dict[str, Tensor]", get_model_state_dict(encoder))
    share, parts = shard_position(state), local_shards(state)
    mine = (
        (name, part.first, part.rows)
        for name, part in parts.items()
        if share.writes and (part.cut or share.shard == 0) and part.rows.numel()
    )
    return WeightStream({name: part.spec for name, part in parts.items()}, mine)


def checkpoint_weights(stored: TensorReader) -> WeightStream:
    """Of a checkpoint: all the encoder's types and shapes, and all rows, part by part as they lie."""
    names = [name for name in stored.specs if name.startswith(ENCODER)]
    pieces = ((name.removeprefix(ENCODER), first, rows) for name in names for first, rows in stored.parts(name))
    return WeightStream({name.removeprefix(ENCODER): stored.specs[name] for name in names}, pieces)


def require_replaceable(to: Path, run_dir: Path) -> Path:
    """The directory to export to, if nothing but an earlier export would be replaced.

    Raises:
        ConfigError: it is a file, it holds the run, or it is a folder with something else in it.
    """
    to = to.expanduser()
    if to.exists() and not to.is_dir():
        raise ConfigError(f"output_dir={to} is a file: name a folder, which will be made")
    if run_dir.resolve().is_relative_to(to.resolve()):
        raise ConfigError(f"output_dir={to} holds the run itself: name a folder of its own")
    if to.is_dir() and any(to.iterdir()) and not (to / "modules.json").is_file():
        raise ConfigError(f"output_dir={to} holds something else than a model: name a new folder, or an earlier export")
    return to if to.name else to.resolve()  # "." has no name to put an ending to


def load_checkpoint_encoder(source: ModelSource, stored: TensorReader) -> Encoder:
    """An encoder in this process's memory with a checkpoint's weights.

    Raises:
        CheckpointError: the weights are not this model's.
    """
    encoder = build_encoder(source)
    pieces = checkpoint_weights(stored)
    state = encoder.state_dict()
    for name in sorted(state.keys() ^ pieces.specs.keys()):
        raise CheckpointError(f"{stored.folder} does not fit the model: {name} is in one of them alone")
    encoder._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t
    )
    state = encoder.state_dict()
    for name, first, rows in pieces.rows:
        shape = pieces.specs[name].shape
        if tuple(state[name].shape) != shape:
            raise CheckpointError(
                f"{stored.folder} does not fit the model: {name} has the shape {list(shape)}, the model's "
                f"{list(state[name].shape)}"
            )
        (state[name] if not rows.dim() else state[name][first : first + len(rows)]).copy_(rows)
    return encoder


def export_dtype(asked: ExportDtype, source: ModelSource) -> torch.dtype:
    """The torch type for `export.dtype`."""
    return stored_dtype(source) if asked is ExportDtype.source else DTYPES[asked]
