"""`torchrun -m embedtrain merge models=[DIR,...] output_dir=DIR`: merge models, streamed over all ranks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.commands.merge.options import LoraMerge, MergeMethod, MergeOptions, compose
from embedtrain.config.paths import require_run, require_sets
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError

if TYPE_CHECKING:  # keeps `--help` free of torch
    from embedtrain.commands.merge.combine import Measures
    from embedtrain.commands.merge.members import Member
    from embedtrain.commands.merge.search import Merger
    from embedtrain.distributed.world import World
    from embedtrain.tracking.console import Console

__all__ = ["MergeOptions", "compose", "require_paths", "run"]

_LOW_COSINE = 0.9


def require_paths(options: MergeOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    if options.run:
        require_run(options.run)
    require_sets([*options.find.sets, *options.find.held_out])


def run(options: MergeOptions) -> Path:
    """Open the models, choose weights, write and verify the merged model; returns its directory, on every rank."""
    from embedtrain.commands.merge.combine import measure
    from embedtrain.commands.merge.members import (
        open_member,
        open_members,
        require_compatible,
        store_streams,
        verify_member,
    )
    from embedtrain.commands.merge.output import locked_output, merge_record, multiply_factors, write_merged
    from embedtrain.commands.merge.search import Merger
    from embedtrain.distributed.world import joined_world
    from embedtrain.formats.export_record import require_replaceable
    from embedtrain.formats.hub import require_export_support, upload_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        with world.fail_together("opening the models"):
            require_export_support(options.export)
            members = open_members(options)
            num_models = len(members)
            _check_number(options, num_models)
            if options.method in (MergeMethod.task_arithmetic, MergeMethod.ties):
                members.append(open_member(str(options.base), "base", options))
            output_dir = Path(options.output_dir)
            for directory in (member.run.architecture if member.run else member.source.directory for member in members):
                assert directory is not None
                output_dir = require_replaceable(output_dir, directory)
        with console.phase("verifying checksums"), world.fail_together("verifying checksums"):
            for member in members:
                verify_member(member, world)
        with world.fail_together("comparing the models"):
            warnings = require_compatible(members)
        console.warn(*warnings)
        with locked_output(output_dir, world) as scratch:
            members = store_streams(members, scratch.members, world)
            with console.progress() as progress:
                measures = measure(members, world, progress)
                merger = Merger.prepare(options, members, measures, world, progress)
            cosines = _report_cosines(members, measures, console)
            weights, search = _weights(options, merger, num_models, world, console)
            _report_weights(members, weights, console)
            record = merge_record(options, members, measures.digests, weights, cosines, search)
            with world.fail_together("reading parts"):
                combine = merger.merged(weights)
            if options.lora is LoraMerge.factors:
                members, combine = multiply_factors(members, combine, scratch.members, world)
            result = write_merged(options, members, combine, record, scratch, world, console)
        if result is not None:
            console.note(f"merged model: {result.directory} ({result.describe()})")
        if options.push_to_hub is not None:
            upload = partial(upload_model, output_dir, options.push_to_hub, private=options.private)
            world.run_on_main("uploading", lambda: console.note(f"uploaded: {upload()}"))
        return output_dir


def _check_number(options: MergeOptions, num_models: int) -> None:
    """A ConfigError for options that do not fit the number of models."""
    if options.weights is not None and len(options.weights) != num_models:
        raise ConfigError(
            f"weights={written(options.weights)}: there are {num_models} models; write one weight of each"
        )
    if options.t is not None and num_models != 2:
        raise ConfigError(f"t={options.t:g}: is for two models, not {num_models}; write weights")
    if options.settings_from >= num_models:
        raise ConfigError(f"settings_from={options.settings_from}: there are {num_models} models, the first is 0")


def _weights(
    options: MergeOptions, merger: "Merger", num_models: int, world: "World", console: "Console"
) -> tuple[list[float], dict[str, Any] | None]:
    """The weights of the models, with the sum 1 unless `normalize_weights` is false, and how they were found."""
    if options.find.method is not None:
        from embedtrain.commands.merge.search import find_weights

        best = find_weights(options.find, merger, num_models, options.settings_from, world, console)
        return best.weights, best.record
    if options.t is not None:
        return [1 - options.t, options.t], None
    weights = options.weights or [1.0] * num_models
    if not options.normalize_weights and options.weights is not None:
        return weights, None
    total = sum(weights)
    return [weight / total for weight in weights], None


def _report_cosines(members: "Sequence[Member]", measures: "Measures", console: "Console") -> list[list[float]]:
    """Print how far the models are from each other; returns the cosines of all pairs."""
    from embedtrain.commands.merge.combine import cosine_and_distance

    cosines = [[1.0] * len(members) for _ in members]
    for first, member in enumerate(members):
        for second in range(first + 1, len(members)):
            cosine, distance = cosine_and_distance(measures.total, first, second)
            cosines[first][second] = cosines[second][first] = cosine
            names = f"{member.name} and {members[second].name}"
            console.note(f"{names}: cosine of the weights {cosine:.6f}, distance {distance:.4g}")
            if cosine < _LOW_COSINE:
                console.warn(
                    f"{names} are far apart (cosine {cosine:.3f}, below {_LOW_COSINE}): they were probably not trained "
                    "from the same model, and what is between them is often worse than both"
                )
    return cosines


def _report_weights(members: "Sequence[Member]", weights: "Sequence[float]", console: "Console") -> None:
    for member, weight in zip(members, weights, strict=False):
        console.note(f"weight {weight:.4g}: {member.name}")
