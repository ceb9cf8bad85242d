"""The command line of doctor."""

import math

from embedtrain.config.compose import compose_one, to_dataclass
from embedtrain.config.door_options import DoctorOptions
from embedtrain.config.folders import folder
from embedtrain.errors import ConfigError


def compose_doctor(arguments: list[str]) -> DoctorOptions:
    """The options of `python -m embedtrain.doctor`; `--json` and `quick` are `json=true` and `quick=true`.

    Raises:
        ConfigError: an unknown option, a value of the wrong type or out of range.
        SystemExit: after `--help` and its like.
    """
    short = {"--json": "json=true", "quick": "quick=true", "--quick": "quick=true"}
    options = to_dataclass(
        compose_one("doctor", folder("configs") / "doors", [short.get(argument, argument) for argument in arguments]),
        DoctorOptions,
    )
    if not math.isfinite(options.timeout) or options.timeout <= 0:
        raise ConfigError(f"timeout={options.timeout}: seconds, above 0")
    return options
