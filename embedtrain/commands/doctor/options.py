"""Options of `python -m embedtrain doctor`."""

from dataclasses import dataclass

from embedtrain.config.command_options import CacheOptions, JsonOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.validation import OptionChecks

HELP = f"""embedtrain doctor: check whether a machine is ready for training

  embedtrain doctor [--json] [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain doctor
  embedtrain doctor quick=true               without slow checks: for containers

Each finding is ok, note, warning or problem, with what to do.
The exit code is 1 if there is a problem, else 0.

{{options: output_dir cache_dir quick hub json timeout}}

{LAUNCH_HELP}"""


@dataclass(kw_only=True)
class DoctorOptions(CacheOptions, JsonOptions):
    """Options of `python -m embedtrain doctor`."""

    output_dir: str = "runs"  # parent directory of runs
    quick: bool = False  # no bandwidth, no disk speed, no request to the Hub
    hub: bool = True  # send requests to the Hugging Face Hub, for some seconds at most
    timeout: float = 120.0  # seconds that ranks wait for each other


def compose_doctor(arguments: list[str]) -> DoctorOptions:
    """The options, checked. `--json` stands for `json=true`, `quick` for `quick=true`."""
    short = {"--json": "json=true", "quick": "quick=true", "--quick": "quick=true"}
    arguments = [short.get(argument, argument) for argument in arguments]
    options = compose_command("doctor", DoctorOptions, arguments, HELP)
    OptionChecks(options).positive("timeout")
    return options
