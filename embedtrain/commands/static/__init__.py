"""`torchrun -m embedtrain static model=DIR dims=256 output_dir=DIR`: a static embedding model on all ranks."""

from pathlib import Path

from embedtrain.commands.static.options import StaticOptions, compose
from embedtrain.config.paths import require_models
from embedtrain.utils.files import expand_user

__all__ = ["StaticOptions", "compose", "require_paths", "run"]


def require_paths(options: StaticOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)


def run(options: StaticOptions) -> Path:
    """Encode the vocabulary on all ranks, and write the directory on rank 0; returns it."""
    from embedtrain.commands.static.table import make_table, require_distillable, write_table
    from embedtrain.config.compressed import check_kind_of_vectors
    from embedtrain.distributed.world import joined_world
    from embedtrain.formats.replacement import require_replaceable
    from embedtrain.inference.loading.command_model import load_encoder_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.models.source import CommandModel
    from embedtrain.tracking.console import Console

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console, output_dir = Console(enabled=world.is_main), Path(options.output_dir)
        with world.fail_together("checking output_dir"):
            if world.is_main:
                output_dir = require_replaceable(output_dir, expand_user(options.model))
        config = CommandModel(
            path=options.model,
            pooling=options.pooling,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        with console.phase("loading the model"):
            model = load_encoder_model(config, options.precision, world)
        check_kind_of_vectors(model.source.kind, "model")
        require_distillable(model, options)
        table = make_table(model, options, world, console)
        with world.fail_together("writing the directory"):
            if world.is_main:
                write_table(table, model, options, output_dir, console)
        return output_dir
