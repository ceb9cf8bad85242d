"""`python -m embedtrain prune model=DIR keep=6 output_dir=DIR`: a smaller model from some of a model's layers."""

from pathlib import Path

from embedtrain.cli.entry import run_command
from embedtrain.commands.prune.options import PruneOptions, compose_prune
from embedtrain.config.paths import require_models


def compose(arguments: list[str]) -> PruneOptions:
    """The options, checked, of a model that exists."""
    options = compose_prune(arguments)
    require_models(model=options.model)
    return options


def main(options: PruneOptions) -> Path:
    """Read the model in one process, write its kept layers as a model directory, reopen and verify it."""
    from embedtrain.commands.prune.layers import prune_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    return prune_model(options, Path(options.output_dir), Console()).directory


if __name__ == "__main__":
    run_command(compose, main)
