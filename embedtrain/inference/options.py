"""Options of `embedtrain.load_encoder`."""

from dataclasses import dataclass

from embedtrain.config.command_options import EncodeOptions, PrecisionOptions, RankOptions, ShardOptions
from embedtrain.config.validation import OptionChecks


@dataclass(kw_only=True)
class EncoderOptions(EncodeOptions, ShardOptions, PrecisionOptions, RankOptions):
    """Options of `embedtrain.load_encoder`."""


def check_encoder(options: EncoderOptions) -> EncoderOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.at_least(1, "chunk_tokens")
    check.length("max_length")
    check.positive("timeout")
    return options
