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

from embedtrain import __version__
from embedtrain.commands.merge.combine import all_pieces, combined_tensors, linear_rows, merged_rows
from embedtrain.commands.merge.members import Member, Piece, pieces_of_rank, store_streams
from embedtrain.commands.merge.options import LoraMerge, MergeMethod, MergeOptions, SlerpScope
from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import ONNX, ExportDtype, WeightsOf
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.formats.export import ExportResult, plan_export
from embedtrain.formats.export_record import export_lock
from embedtrain.formats.hub import split_revision
from embedtrain.formats.model_card import UNNAMED, card_header, description, hub_id
from embedtrain.formats.peft import load_rows
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.verify import ExportReference, export_tolerance
from embedtrain.formats.weights import (
    DTYPES,
    WeightStream,
    clear_pooler,
    pooler_weights,
    stored_pooler,
    write_architecture,
)
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.models.build import assemble_encoder
from embedtrain.models.stored_weights import stored_dtype
from embedtrain.tracking.console import Console
from embedtrain.utils.files import remove_tree, write_json

MERGE_RECORD = "merge.json"
# Options that say where the merge ran, or what is in other keys of the record.
_LEFT_OUT = ("models", "run", "steps", "output_dir", "weights", "timeout", "push_to_hub", "private")


def merge_record(
    options: MergeOptions,
    members: Sequence[Member],
    digests: Sequence[str],
    weights: Sequence[float],
    cosines: Sequence[Sequence[float]],
    search: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The content of merge.json. Of methods with a base, the last of `members` is the base."""
    num_models = len(weights)
    models = [
        {"model": member.name, "digest": digest, "commit": member.source.commit, "weight": weight}
        for member, digest, weight in zip(members, digests, weights, strict=False)
    ]
    record: dict[str, Any] = {"embedtrain": __version__, "models": models}
    if len(members) > num_models:
        record["base"] = {"model": members[-1].name, "digest": digests[-1], "commit": members[-1].source.commit}
    plain = {name: value for name, value in to_plain(options).items() if name not in _LEFT_OUT}
    record |= {"options": plain, "cosines": [list(row) for row in cosines]}
    return record | ({} if search is None else {"search": dict(search)})


def merge_card(
    options: MergeOptions, settings: Member, max_length: int, record: Mapping[str, Any], architecture: Path
) -> str:
    """README.md of the merged model, whose settings are those of the member `settings`."""
    source, kind = settings.source, settings.source.kind
    dimension = settings.truncate_dim or source.dimension
    name = options.push_to_hub or UNNAMED
    models = [*record["models"], *([record["base"]] if "base" in record else [])]
    bases = [hub_id(split_revision(model["model"])[0]) for model in models]
    ids = [base for base in dict.fromkeys(bases) if base]
    title = options.push_to_hub.split("/")[-1] if options.push_to_hub else Path(options.output_dir).name
    lines = [
        card_header(kind, ids, "embedtrain", "merge", *[ONNX] * (ONNX in options.formats), relation="merge"),
        f"# {title}",
        "",
        f"{description(kind, dimension, max_length)}, merged from "
        f"{len(record['models'])} models with embedtrain {__version__}.",
        "",
        *kind.files.usage(name, source.prompts, architecture),
        *kind.files.graph_usage() * (ONNX in options.formats),
        "## Merged models",
        "",
        f"{_describe_method(options)}",
        "",
        "| model | weight | digest of the weights |",
        "| --- | ---: | --- |",
        *(f"| {_shown(m['model'])} | {m['weight']:.4g} | `{m['digest']}` |" for m in record["models"]),
        *(f"| {_shown(m['model'])} (base) | | `{m['digest']}` |" for m in [record.get("base")] if m),
        "",
        f"`{MERGE_RECORD}` has all options and the cosines of the models' weights.",
        "",
    ]
    return "\n".join([*lines, *_evaluation(record.get("search"))])


def _describe_method(options: MergeOptions) -> str:
    match options.method:
        case MergeMethod.linear:
            if options.lora is LoraMerge.factors:
                return "The factors of the LoRA adapters are the weighted means of those of these checkpoints."
            averages = " moving averages of the" if options.weights_of is WeightsOf.ema else ""
            return f"The weights are the weighted mean of the{averages} weights of these models."
        case MergeMethod.slerp:
            angle = "each tensor" if options.scope is SlerpScope.tensor else "all weights together"
            return f"The weights are the spherical interpolation (slerp) of {angle}, of these models."
        case MergeMethod.task_arithmetic:
            what = f"{options.scale:g} times the weighted mean of the models' differences from it"
        case MergeMethod.ties:
            what = (
                f"{options.scale:g} times the mean of the models' differences from it, of the largest "
                f"{options.density:.0%} of each tensor, where signs agree (TIES)"
            )
    return f"The weights are those of the base, plus {what}."


def _shown(path: str) -> str:
    """A Hub id, or the last parts of a local path: folders above it are private."""
    if hub_id(split_revision(path)[0]):
        return f"`{path}`"
    parts = [part for part in Path(path).parts if part not in ("..", "~", "/")]
    return f"`{'/'.join(parts[-3:] if 'checkpoints' in parts else parts[-2:])}`"


def _evaluation(search: Mapping[str, Any] | None) -> list[str]:
    if search is None:
        return []
    lines = ["## Evaluation", "", "The weights were chosen on some of these sets, which are no test sets any more.", ""]
    sets = list(search["merged"])
    lines += [f"| model | {' | '.join(sets)} |", "| --- |" + " ---: |" * len(sets)]
    rows = {**search["members"], "merged": search["merged"]}
    lines += [
        f"| {_shown(name) if name != 'merged' else name} | {' | '.join(f'{values[s]:.4f}' for s in sets)} |"
        for name, values in rows.items()
    ]
    chosen = ", ".join(search["chosen_on"])
    return [*lines, "", f"Chosen on: {chosen}.", ""]


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
    dtypes = {stored_dtype(member.source) for member in members}
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
            if settings.run is None:
                write_architecture(architecture, settings.source, tokenizer)
            else:
                shutil.copytree(settings.run.architecture, architecture)
            if not _have_pooler(members, stored_pooler(architecture)):
                clear_pooler(architecture)
    rope_theta = None if settings.run is None else settings.run.export.rope_theta
    config = replace(options.export, truncate_dim=settings.truncate_dim, rope_theta=rope_theta)
    with world.fail_together("preparing the directory"):
        weights = WeightStream(dict(members[0].specs), iter(()))
        base = settings.source if settings.run is None else None
        output_dir = Path(options.output_dir)
        export = plan_export(output_dir, scratch.unfinished, architecture, weights, dtype, config, base=base)
        if world.is_main:
            export.begin()
    with console.progress() as progress, world.fail_together("writing the merged weights"):
        export.write(merged_rows(members, own, combine, dtype, progress), main=world.is_main)
    result: ExportResult | None = None

    def verify() -> None:
        nonlocal result
        assert tokenizer is not None
        write_json(scratch.unfinished / MERGE_RECORD, record)
        reference: ExportReference | None = None
        if options.check:
            with console.phase("encoding probe texts with the merged weights"):
                reference = _reference(members, pieces, combine, settings, tokenizer, dtype)
        card = merge_card(options, settings, tokenizer.max_length, record, architecture)
        result = export.finish(card, reference, trust_remote_code=options.trust_remote_code, phase=console.phase)

    world.run_on_main("verifying the merged model", verify)
    return result


def _have_pooler(members: Sequence[Member], pooler: Mapping[str, Tensor]) -> bool:
    """Whether all members have this pooler, which no encoder uses; of others the merged model has none."""

    def has_pooler(member: Member) -> bool:
        own = pooler_weights(member.source) if member.run is None else stored_pooler(member.run.architecture)
        return own.keys() == pooler.keys() and all(torch.equal(own[name], pooler[name]) for name in own)

    return not pooler or all(map(has_pooler, members))


def multiply_factors(
    members: Sequence[Member], combine: Callable[[Piece], Tensor], folder: Path, world: World
) -> tuple[list[Member], Callable[[Piece], Tensor]]:
    """The model with the combined factors of its adapters merged, as a single member, and its rows. A collective."""
    first = members[0]
    run, adapters = first.run, first.adapters
    assert run is not None
    assert adapters is not None
    stream = functools.partial(adapters.merged, combined_tensors(members, combine))
    whole = replace(first, specs=stream().specs, tensors={}, stream=stream, run=replace(run, adapters=None))
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
