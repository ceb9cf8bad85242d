"""Options of `python -m embedtrain calibrate`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embedtrain.config.command_options import (
    DocumentOptions,
    ModelOptions,
    OutputOptions,
    PrecisionOptions,
    RankOptions,
    ShardOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.validation import OptionChecks

HELP = f"""embedtrain calibrate: prepare a model's vectors for compression

  embedtrain calibrate model=DIR data=PATH output_dir=DIR [option=value ...]

PATH: a BEIR folder, a file of documents, or training rows, whose documents are
used. Nothing is trained.

{{options: model! data! output_dir! head dims documents ranges precision}}

{LAUNCH_HELP}

The new directory has a further Dense module, which every library applies, and
quantisation.json with the ranges of int8 and uint8."""


class CalibrationHead(str, Enum):
    """The affine head that is added to the model.

    `pca`: subtracts the mean vector and rotates to the principal components, the first ones first. `mean`: subtracts
    the mean vector. `none`: no head, only ranges.
    """

    pca = "pca"
    mean = "mean"
    none = "none"


@dataclass(kw_only=True)
class CalibrateOptions(ModelOptions, DocumentOptions, OutputOptions, ShardOptions, PrecisionOptions, RankOptions):
    """Options of `python -m embedtrain calibrate`."""

    # BEIR folder, file of documents, or training rows, whose documents are used; a pattern, or a list of these.
    data: Any = None
    head: CalibrationHead = CalibrationHead.pca
    dims: int | None = None  # with head=pca: the vectors' new number of dimensions; default: as before
    documents: int = 10000  # at most so many are encoded: a fixed sample
    ranges: list[int] = field(default_factory=list)  # also write ranges of so many first dimensions, as [256,128]

    @property
    def paths(self) -> list[str]:
        """The elements of `data`."""
        return [self.data] if isinstance(self.data, str) else list(self.data or [])


def compose(arguments: list[str]) -> CalibrateOptions:
    """The options, checked."""
    options = compose_command("calibrate", CalibrateOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(
        bool(options.paths) and all(isinstance(path, str) and path for path in options.paths),
        "data",
        "must be the path of a BEIR folder, of documents or of training rows, or a list of such paths",
    )
    check.require(bool(options.output_dir), "output_dir", "is missing; write the new model directory")
    check.at_least(2, "documents")
    check.at_least(1, "dims")
    check.require(
        options.dims is None or options.head is CalibrationHead.pca,
        "dims",
        "is for head=pca; leave it out",
    )
    is_valid = min(options.ranges, default=1) >= 1 and len(set(options.ranges)) == len(options.ranges)
    check.require(is_valid, "ranges", "must be different numbers of dimensions above 0, such as [256,128]")
    check.at_least(1, "chunk_tokens")
    check.length("max_length")
    check.positive("timeout")
    return options
