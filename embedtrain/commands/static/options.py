"""Options of `python -m embedtrain static`."""

from dataclasses import dataclass

from embedtrain.config.code import code_option
from embedtrain.config.compose import compose_command
from embedtrain.config.evaluation import Unshard
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.recipe import ExportDtype, Pooling, Precision
from embedtrain.config.validation import OptionChecks

HELP = f"""embedtrain static: a static embedding model from a model

  embedtrain static model=DIR dims=256 output_dir=DIR [option=value ...]

Each token of the vocabulary is encoded alone. The result is a table of vectors,
whose mean over the tokens of a text is its vector: no transformer, and no GPU.

{{options: model! output_dir! dims sif_coefficient max_length dtype}}

{LAUNCH_HELP}

Train it further as any model:
  embedtrain train recipe=NAME model.path=DIR optim.lr=0.01 ..."""


@dataclass(kw_only=True)
class StaticOptions:
    """Options of `python -m embedtrain static`."""

    model: str = ""  # dense embedding model whose tokens are encoded: directory or Hub id
    output_dir: str = ""  # for the static model; only an earlier export there is replaced
    dims: int | None = 256  # principal components of the tokens' vectors that are kept; null: all dimensions
    # a in the weight a / (a + p) of a token, whose frequency p is that of its rank in the vocabulary by Zipf's law;
    # null: all tokens weigh the same.
    sif_coefficient: float | None = 1e-4
    max_length: int = 512  # tokens of a text that the static model averages; a table has no limit of its own

    pooling: Pooling | None = None  # of the model that encodes the tokens; default: the model's
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    # Execute Python code of the model: only for authors you trust
    trust_remote_code: bool = code_option(False, "model", "revision")
    dtype: ExportDtype = ExportDtype.fp32  # in which the table is written; source: fp32
    check: bool = True  # reopen the directory and compare its vectors with those of the table
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # per forward pass of a rank, including padding
    unshard: Unshard = Unshard.layer
    timeout: float = 1800.0  # seconds that a rank waits for the others before all fail


def compose(arguments: list[str]) -> StaticOptions:
    """The options, checked."""
    options = compose_command("static", StaticOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the static model")
    check.at_least(1, "dims")
    if options.sif_coefficient is not None:
        check.positive("sif_coefficient")
    check.length("max_length")
    check.at_least(1, "chunk_tokens")
    check.positive("timeout")
    return options
