"""Writes the merged model as an export is written: all ranks fill the files, one reopens and compares them."""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedtrain.commands.merge.card import MERGE_RECORD, merge_card
from embedtrain.commands.merge.combine import all_pieces, combined_tensors, linear_rows, merged_rows
from embedtrain.commands.merge.members import Member, store_streams
from embedtrain.commands.merge.options import MergeOptions
from embedtrain.commands.merge.stored_weights import Piece, pieces_of_rank
from embedtrain.config.recipe import ExportDtype
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.formats.export import ExportResult, plan_export
from embedtrain.formats.peft import load_rows
from embedtrain.formats.replacement import export_lock
from embedtrain.formats.verify import ExportReference, export_tolerance
from embedtrain.formats.weights import (
    DTYPES,
    WeightStream,
    clear_pooler,
    pooler_weights,
    stored_pooler,
    write_architecture,
)
from embedtrain.inference.loading.bound_tokenizer import bound_tokenizer
from embedtrain.models.build import assemble_encoder
from embedtrain.models.tokenizer import load_tokenizer
from embedtrain.tracking.console import Console
from embedtrain.utils.files import remove_tree, write_json

_SCRATCH = ".tmp"  # as the scratch folders of exports, whose leftovers are removed with them


@dataclass(frozen=True, slots=True)
class Scratch:
    """Folders beside the output directory that do not exist yet."""

    unfinished: Path  # becomes the output directory
    members: Path  # weights of members that can only be read in order
    architecture: Path  # the directory without weights


@contextlib.contextmanager
def locked_output(output_dir: Path, world: World) -> Iterator[Scratch]:
    """Prevent concurrent merges to the same directory, and remove the scratch folders at the end. A collective."""
    with contextlib.ExitStack() as stack:
        unfinished = ""
        with world.fail_together("taking the output directory"):
            if world.is_main:
                unfinished = str(stack.enter_context(export_lock(output_dir)))
        path = Path(world.broadcast(unfinished))
        # Names of the same form, so that those of a killed merge are removed by the next one.
        number = int(path.name.removesuffix(_SCRATCH).rpartition(".")[2], 16)
        members, architecture = (
            path.with_name(f"{output_dir.name}.{(number + offset) % (1 << 64):016x}{_SCRATCH}") for offset in (1, 2)
        )
        try:
            yield Scratch(path, members, architecture)
        finally:
            if world.is_main:
                remove_tree(members)
                remove_tree(architecture)


def output_dtype(members: Sequence[Member], option: ExportDtype) -> torch.dtype:
    """The type of the merged weights: with `source` the widest of the members', float32 for bfloat16 and float16."""
    if option is not ExportDtype.source:
        return DTYPES[option]
    dtypes = {member.dtype for member in members}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def write_merged(
    options: MergeOptions,
    members: Sequence[Member],
    combine: Callable[[Piece], Tensor],
    record: dict[str, Any],
    scratch: Scratch,
    world: World,
    console: Console,
) -> ExportResult | None:
    """Write, reopen and compare the directory; the result on rank 0. A collective.

    Raises CheckpointError on every rank if the directory does not reproduce the outputs of the merged weights.
    """
    settings = members[options.settings_from]
    dtype = output_dtype(members, options.dtype)
    pieces = all_pieces(members)
    own = list(pieces_of_rank(pieces, members[0].specs, world.rank, world.size))
    tokenizer: TextTokenizer | None = None
    with world.fail_together("writing the settings"):
        architecture = scratch.architecture
        if world.is_main:
            tokenizer = bound_tokenizer(settings.source, load_tokenizer(settings.source))
            if settings.architecture is None:
                write_architecture(architecture, settings.source, tokenizer)
            else:
                shutil.copytree(settings.architecture, architecture)
            if not _have_pooler(members, stored_pooler(architecture)):
                clear_pooler(architecture)
    config = replace(options.export, truncate_dim=settings.truncate_dim, rope_theta=settings.rope_theta)
    with world.fail_together("preparing the directory"):
        weights = WeightStream(dict(members[0].specs), iter(()))
        export = plan_export(Path(options.output_dir), scratch.unfinished, architecture, weights, dtype, config)
        if world.is_main:
            export.begin()
    with console.progress() as progress, world.fail_together("writing the merged weights"):
        export.write(merged_rows(members, own, combine, dtype, progress), main=world.is_main)
    result: ExportResult | None = None
    with world.fail_together("verifying the merged model"):
        if world.is_main:
            assert tokenizer is not None
            write_json(scratch.unfinished / MERGE_RECORD, record)
            reference: ExportReference | None = None
            if options.check:
                with console.phase("encoding probe texts with the merged weights"):
                    reference = _reference(members, pieces, combine, settings, tokenizer, dtype)
            card = merge_card(options, settings, tokenizer.max_length, record, architecture)
            result = export.finish(card, reference, trust_remote_code=options.trust_remote_code, phase=console.phase)
    return result


def _have_pooler(members: Sequence[Member], pooler: Mapping[str, Tensor]) -> bool:
    """Whether all members have this pooler, which no encoder uses; of others the merged model has none."""

    def has_pooler(member: Member) -> bool:
        own = pooler_weights(member.source) if member.architecture is None else stored_pooler(member.architecture)
        return own.keys() == pooler.keys() and all(torch.equal(own[name], pooler[name]) for name in own)

    return not pooler or all(map(has_pooler, members))


def multiply_factors(
    members: Sequence[Member], combine: Callable[[Piece], Tensor], folder: Path, world: World
) -> tuple[list[Member], Callable[[Piece], Tensor]]:
    """The model with the combined factors of its adapters merged, as a single member, and its rows. A collective."""
    first = members[0]
    adapters = first.adapters
    assert adapters is not None
    stream = functools.partial(adapters.merged, combined_tensors(members, combine))
    whole = replace(first, specs=stream().specs, tensors={}, stream=stream, adapters=None)
    stored = store_streams([whole], folder, world)
    return stored, lambda piece: linear_rows(stored, piece, [1.0])


def _reference(
    members: Sequence[Member],
    pieces: Sequence[Piece],
    combine: Callable[[Piece], Tensor],
    settings: Member,
    tokenizer: TextTokenizer,
    dtype: torch.dtype,
) -> ExportReference:
    """Outputs of the merged weights, which are computed again and not read from the directory."""
    encoder = assemble_encoder(settings.source)
    load_rows(merged_rows(members, pieces, combine, torch.float32), encoder.state_dict())
    return ExportReference.of(encoder, settings.source, tokenizer, export_tolerance(dtype, exact_encoder=True))


def read_record(directory: Path) -> dict[str, Any]:
    """The content of merge.json of a merged model."""
    record: dict[str, Any] = json.loads((directory / MERGE_RECORD).read_text(encoding="utf-8"))
    return record
