"""`torchrun -m embedtrain static model=DIR pca_dims=256 output_dir=DIR`: a static embedding model on all ranks."""

from dataclasses import dataclass
from pathlib import Path

from embedtrain.config.command_options import (
    KindOptions,
    ModelOptions,
    PoolingOptions,
    PrecisionOptions,
    RankOptions,
    ShardOptions,
    WrittenModelOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.options import LENGTH, option
from embedtrain.config.paths import require_models
from embedtrain.config.validation import OptionChecks
from embedtrain.utils.files import expand_user

HELP = f"""embedtrain static: a static embedding model from a model

  embedtrain static model=DIR pca_dims=256 output_dir=DIR [option=value ...]

Each token of the vocabulary is encoded alone. The result is a table of vectors,
whose mean over the tokens of a text is its vector: no transformer, and no GPU.

{{options: model! output_dir! pca_dims sif_coefficient max_length dtype}}

{LAUNCH_HELP}

Train it further as any model:
  embedtrain train recipe=NAME model.path=DIR optim.lr=0.01 ..."""


@dataclass(kw_only=True)
class StaticOptions(
    RankOptions, PrecisionOptions, ShardOptions, WrittenModelOptions, PoolingOptions, KindOptions, ModelOptions
):
    """Options of `python -m embedtrain static`."""

    # principal components of the tokens' vectors that are kept; null: all dimensions
    pca_dims: int | None = option(256, at_least=1)
    # a in the weight a / (a + p) of a token, whose frequency p is that of its rank in the vocabulary by Zipf's law;
    # null: all tokens weigh the same.
    sif_coefficient: float | None = option(1e-4, above=0)
    # tokens of a text that the static model averages; a table has no limit of its own
    max_length: int = option(512, **LENGTH)


def compose(arguments: list[str]) -> StaticOptions:
    """The options, checked."""
    options = compose_command("static", StaticOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the static model")
    return options


def require_paths(options: StaticOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)


def run(options: StaticOptions) -> Path:
    """Encode the vocabulary on all ranks, and write the directory on rank 0; returns it."""
    from embedtrain.commands.static.table import make_table, require_distillable, require_fast_tokenizer, write_table
    from embedtrain.distributed.world import joined_world
    from embedtrain.formats.export_record import require_replaceable
    from embedtrain.formats.source import CommandModel
    from embedtrain.inference.loading.command_model import load_encoder_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console, output_dir = Console(enabled=world.is_main), Path(options.output_dir)
        with world.fail_together("checking output_dir"):
            if world.is_main:
                output_dir = require_replaceable(output_dir, expand_user(options.model))
        config = CommandModel(
            path=options.model,
            kind=options.kind or "",
            pooling=options.pooling,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        with console.phase("loading the model"):
            model = load_encoder_model(
                config, options.precision, world, check=lambda source: require_distillable(source, options)
            )
        require_fast_tokenizer(model, options)
        table = make_table(model, options, world, console)
        with world.fail_together("writing the directory"):
            if world.is_main:
                write_table(table, model, options, output_dir, console)
        return output_dir
