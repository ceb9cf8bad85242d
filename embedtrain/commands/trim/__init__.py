"""`python -m embedtrain trim model=DIR data=[PATH,...] top=64000 output_dir=DIR`: a smaller vocabulary for a model."""

from pathlib import Path

from embedtrain.commands.trim.options import TrimOptions, compose
from embedtrain.config.paths import require_models, require_sources

__all__ = ["TrimOptions", "compose", "require_paths", "run"]


def require_paths(options: TrimOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)
    require_sources(options.data or [], options.corpus)


def run(options: TrimOptions) -> Path:
    """Count the tokens of the texts, write the model with the tokens to keep, reopen and verify it."""
    from embedtrain.commands.trim.vocabulary import trim_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    return trim_model(options, Path(options.output_dir), Console()).directory
