"""The command line of doctor."""

import math
from dataclasses import dataclass

from embedtrain.config.compose import compose_command
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class DoctorOptions:
    """Options of `python -m embedtrain.doctor`."""

    output_dir: str = "runs"  # where runs are to be written
    cache_dir: str | None = None  # as data.cache_dir
    quick: bool = False  # no bandwidth, no speed of disks, no question to the Hub
    hub: bool = True  # ask the Hugging Face Hub, for some seconds at most
    json: bool = False  # one JSON object instead of a list; `--json` is the same
    timeout: float = 120.0  # seconds that ranks wait for each other


def compose_doctor(arguments: list[str]) -> DoctorOptions:
    """The options of `python -m embedtrain.doctor`; `--json` and `quick` are `json=true` and `quick=true`.

    Raises:
        ConfigError: an unknown option, a value of the wrong type or out of range.
        SystemExit: after `--help` and its like.
    """
    short = {"--json": "json=true", "quick": "quick=true", "--quick": "quick=true"}
    arguments = [short.get(argument, argument) for argument in arguments]
    options = compose_command("doctor", DoctorOptions, arguments)
    if not math.isfinite(options.timeout) or options.timeout <= 0:
        raise ConfigError(f"timeout={options.timeout}: seconds, above 0")
    return options
