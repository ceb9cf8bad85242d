"""`torchrun -m embedtrain vectors model=DIR data=[PATH,...] output_dir=DIR`: a teacher's vectors on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.config.checks import check_train_sources
from embedtrain.config.command_options import (
    DimsOptions,
    EncodeOptions,
    ErrorOptions,
    FastPrecisionOptions,
    OutputOptions,
    RankOptions,
    RowsOptions,
    ShardOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sources
from embedtrain.config.paths import require_models, require_output_outside, require_sources
from embedtrain.config.recipe import Precision
from embedtrain.config.validation import OptionChecks, model_options_named
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user

if TYPE_CHECKING:
    from embedtrain.data.cache.row_store import RowStore
    from embedtrain.distributed.world import World
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.console import Console

HELP = f"""embedtrain vectors: a teacher's vectors of all texts of training data

  embedtrain vectors model=DIR data=[PATH,...] output_dir=DIR [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain vectors model=DIR data=[PATH] ...

PATH: whatever training reads. Training takes the directory as teacher:
loss=distill_embeddings loss.teacher=DIR. The same command resumes, on any
number of ranks.

{{options: model! data! output_dir! dims dtype query_prompt document_prompt max_length precision}}

{LAUNCH_HELP}"""


class VectorType(str, Enum):
    """The numbers that are stored; int8 has a scale for each vector."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


@dataclass(kw_only=True)
class VectorsOptions(
    RankOptions,
    FastPrecisionOptions,
    ShardOptions,
    ErrorOptions,
    DimsOptions,
    OutputOptions,
    RowsOptions,
    EncodeOptions,
):
    """Options of `python -m embedtrain vectors`."""

    dtype: VectorType = VectorType.bf16

    # Texts that are encoded and written together; an interrupted run resumes after them.
    rows_per_part: int = option(16384, within=(1, 1 << 20))


def compose(arguments: list[str]) -> VectorsOptions:
    """The options, checked."""
    options = compose_command("vectors", VectorsOptions, arguments, HELP)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(bool(options.data), "data", "is missing; write data=[PATH,...], whatever training reads")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the vectors")
    check_train_sources(options.data, "data")
    require_output_outside(options.output_dir, options.data)
    return options


def require_paths(options: VectorsOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model, adapter=options.adapter)
    require_sources(options.data)


def run(options: VectorsOptions) -> Path:
    """Read the rows, encode each text once, and write the vectors. Returns the directory."""
    from embedtrain.distributed.sharding import resolve_precision
    from embedtrain.distributed.world import joined_world
    from embedtrain.inference.loading.command_model import (
        MODEL_OPTION_NAMES,
        command_model_config,
        open_encoder_source,
    )
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.inference.vector_directory import VectorDirectory, distinct_texts, teacher_identity
    from embedtrain.tracking.console import Console

    quiet_libraries()
    output_dir = expand_user(options.output_dir)
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        default = Precision.auto if world.device.type == "cuda" else Precision.fp32
        precision = resolve_precision(options.precision or default, world)
        model = command_model_config(options)
        with world.fail_together("opening the model"), model_options_named(MODEL_OPTION_NAMES):
            source = open_encoder_source(model)[1]
            _require_vectors(options, source)
        stores = _read_rows(options, output_dir, world, console)
        identity = teacher_identity(
            source,
            precision,
            world,
            max_length=options.max_length,
            dims=options.dims,
            dtype=options.dtype.value,
            rows_per_part=options.rows_per_part,
        )
        with world.fail_together("collecting texts"):
            texts = distinct_texts(stores, identity["query_prompt"], identity["document_prompt"])
        directory = VectorDirectory(output_dir, model, identity, texts, world)
        if directory.is_complete():
            console.note(f"{options.output_dir} already holds the vectors of this command: nothing to do")
            return output_dir
        stored = directory.encode(
            chunk_tokens=options.chunk_tokens, unshard=options.unshard, timeout=options.timeout, console=console
        )
        console.note(f"{options.output_dir}: {stored.describe()}")
        return output_dir


def _read_rows(options: VectorsOptions, output_dir: Path, world: "World", console: "Console") -> "Sequence[RowStore]":
    from embedtrain.data.cache.cache import Cache, writable_cache_directory
    from embedtrain.data.cache.row_store import read_sources
    from embedtrain.data.sources.layouts import TEXTS_ONLY
    from embedtrain.data.sources.resolve import expand_sources

    fallback = output_dir.with_name(f"{output_dir.name}.cache")
    cache_dir = writable_cache_directory(options.cache_dir, fallback, world, console.note)
    with world.fail_together("reading rows"), console.progress() as progress:
        cache = Cache.of_world(cache_dir, world, progress=progress)
        stores = read_sources(expand_sources(options.data), options.on_error, TEXTS_ONLY, cache)
        cache.verification.wait()
    for store in stores:
        console.note(str(store.report))
        console.warn(*store.report.warnings())
    return stores


def _require_vectors(options: VectorsOptions, source: "ModelSource") -> None:
    """A ConfigError for a model that does not give each text one vector, or one of fewer dimensions."""
    if not source.kind.has_one_vector:
        raise ConfigError(f"model={options.model}: does not give each text one vector; write a dense embedding model")
    source.require_dimensions([options.dims], "dims")
