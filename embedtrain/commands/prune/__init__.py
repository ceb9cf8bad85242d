"""`python -m embedtrain prune model=DIR keep=6 output_dir=DIR`: a smaller model from some of a model's layers."""

from pathlib import Path

from embedtrain.commands.prune.options import PruneOptions, compose
from embedtrain.config.paths import require_models

__all__ = ["PruneOptions", "compose", "require_paths", "run"]


def require_paths(options: PruneOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)


def run(options: PruneOptions) -> Path:
    """Read the model in one process, write its kept layers as a model directory, reopen and verify it."""
    from embedtrain.commands.prune.layers import prune_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    return prune_model(options, Path(options.output_dir), Console()).directory
