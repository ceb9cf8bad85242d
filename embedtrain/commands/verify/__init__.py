"""`python -m embedtrain verify model=DIR`: whether libraries and serving engines compute the output of a model."""

from typing import TYPE_CHECKING

from embedtrain.commands.verify.options import VerifyOptions, compose
from embedtrain.config.paths import require_models
from embedtrain.errors import CheckpointError, ModelError
from embedtrain.utils.files import expand_user

if TYPE_CHECKING:  # keeps `--help` free of torch
    from collections.abc import Sequence

    from embedtrain.commands.verify.engines import Outcome

__all__ = ["VerifyOptions", "compose", "require_paths", "run"]


def require_paths(options: VerifyOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)


def run(options: VerifyOptions) -> list["Outcome"]:
    """Encode probe texts, or score pairs, with the model and with each engine, one after the other.

    Prints the differences. Raises CheckpointError if an engine cannot run, or computes something else.
    """
    from embedtrain.commands.verify.engines import interpreters, run_engine
    from embedtrain.commands.verify.probes import probe_model
    from embedtrain.distributed.world import joined_world
    from embedtrain.formats.serving import ENGINES, ServedModel
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    directory, console = expand_user(options.model).absolute(), Console()
    if not directory.is_dir():
        raise ModelError(f"model={options.model} is not a directory: export the model, or download it first")
    pythons = interpreters(options)
    quiet_libraries()
    with joined_world() as world, console.phase("encoding with the encoder"):
        probe = probe_model(directory, world)
    outcomes, served = [], ServedModel.open(directory, probe.source)
    for engine, python in pythons.items():
        if reasons := ENGINES[engine].reasons_against(served):
            console.note(f"{engine}: not compared, {'; '.join(reasons)}")
            continue
        with console.phase(f"encoding with {engine}"):
            outcome = run_engine(engine, python, probe)
        known = ENGINES[engine].known_differences(served)
        console.note(_describe(outcome, options.tolerance, known))
        outcomes += [outcome] if outcome.is_supported else []
    failed = [outcome.engine for outcome in outcomes if not outcome.passes(options.tolerance)]
    if failed:
        raise CheckpointError(f"{', '.join(failed)}: not the output of the model (tolerance={options.tolerance})")
    return outcomes


def _describe(outcome: "Outcome", tolerance: float, known: "Sequence[str]") -> str:
    if not outcome.is_supported:
        return f"{outcome.engine} {outcome.version}: not compared, {outcome.reason}"
    if outcome.differences is None:
        return f"{outcome.engine}: failed, {outcome.reason}"
    roles = ", ".join(f"{role} {value:.1e}" for role, value in outcome.differences.items())
    verdict = "equal" if outcome.passes(tolerance) else "DIFFERENT"
    reasons = [] if outcome.passes(tolerance) else [*known]
    if outcome.changes:
        reasons += [f"without texts that it changes: it {outcome.changes}"]
    notes = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{outcome.engine} {outcome.version}: {verdict}, largest difference {roles}{notes}"
