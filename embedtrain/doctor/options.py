"""Options of `python -m embedtrain.doctor`."""

from dataclasses import dataclass

from embedtrain.config.compose import compose_command
from embedtrain.config.validation import OptionChecks

HELP = """embedtrain.doctor: is this machine fit to train?

  python -m embedtrain.doctor [--json] [option=value ...]
  torchrun --standalone --nproc-per-node 8 -m embedtrain.doctor      all ranks, and the bandwidth between them
  python -m embedtrain.doctor quick=true                             nothing that takes long: for containers

Each finding is ok, note, warning or problem; what is not ok says what to do. The exit code is 1 where there is a
problem, else 0.

Options and their defaults (override with option=value):

{options}
Each option is explained in embedtrain/doctor/options.py, DoctorOptions."""


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
    """The options, checked. `--json` stands for `json=true`, `quick` for `quick=true`."""
    short = {"--json": "json=true", "quick": "quick=true", "--quick": "quick=true"}
    arguments = [short.get(argument, argument) for argument in arguments]
    options = compose_command("doctor", DoctorOptions, arguments, HELP)
    OptionChecks(options).positive("timeout")
    return options
