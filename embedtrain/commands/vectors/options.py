"""Options of `python -m embedtrain vectors`."""

from dataclasses import dataclass
from enum import Enum

from embedtrain.config.checks import check_train_sources
from embedtrain.config.command_options import (
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
from embedtrain.config.parsing import parse_sources
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user

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
    EncodeOptions, RowsOptions, OutputOptions, ErrorOptions, ShardOptions, FastPrecisionOptions, RankOptions
):
    """Options of `python -m embedtrain vectors`."""

    dims: int | None = None  # keep the first so many dimensions, of Matryoshka models; default: all
    dtype: VectorType = VectorType.bf16

    # Texts that are encoded and written together; an interrupted run resumes after them.
    rows_per_part: int = 16384


def compose(arguments: list[str]) -> VectorsOptions:
    """The options, checked."""
    options = compose_command("vectors", VectorsOptions, arguments, HELP)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(bool(options.data), "data", "is missing; write data=[PATH,...], whatever training reads")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the vectors")
    check.at_least(1, "dims")
    check.length("max_length")
    check.at_least(1, "chunk_tokens")
    check.within(1, 1 << 20, "rows_per_part")
    check.positive("timeout")
    check_train_sources(options.data, "data")
    output_dir = expand_user(options.output_dir).resolve()
    for source in options.data:
        directory = expand_user(source.path)
        if directory.is_dir() and output_dir.is_relative_to(directory.resolve()):
            raise ConfigError(
                f"output_dir={options.output_dir} is in {source.path}, whose files are all read as rows: write a "
                "directory outside"
            )
    return options
