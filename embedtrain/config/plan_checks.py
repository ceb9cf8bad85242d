"""Options of `python -m embedtrain.plan` that cannot work."""

import math

from embedtrain.config.door_options import PlanOptions
from embedtrain.errors import ConfigError


def check_plan(options: PlanOptions) -> PlanOptions:
    """The options themselves, if they can work.

    Raises:
        ConfigError: a number out of range, or nodes that are not full.
    """
    for name in ("gpus", "gpus_per_node", "texts_per_row", "tokens_per_text"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: at least 1")
    for name in ("gpu_memory", "bandwidth_node", "bandwidth_network", "tflops"):
        value = getattr(options, name)
        if not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name}={value}: must be above 0")
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        full = options.gpus // options.gpus_per_node * options.gpus_per_node
        raise ConfigError(
            f"gpus={options.gpus} with gpus_per_node={options.gpus_per_node}: nodes have as many each; "
            f"write gpus={full} or gpus={full + options.gpus_per_node}"
        )
    return options
