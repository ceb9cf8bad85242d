"""`python -m embedtrain doctor`: checks whether a machine, or under torchrun all hosts, are ready for training.

The exit code is 1 if there is a problem, else 0.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from embedtrain.config.command_options import CacheOptions, JsonOptions, OutputOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.options import option

if TYPE_CHECKING:
    from embedtrain.commands.doctor.host import Finding

HELP = f"""embedtrain doctor: check whether a machine is ready for training

  embedtrain doctor [--json] [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain doctor
  embedtrain doctor quick=true               without slow checks: for containers

Each finding is ok, note, warning or problem, with what to do.
The exit code is 1 if there is a problem, else 0. Among the disks that are
checked is that of output_dir, by default runs.

{{options: output_dir cache_dir quick hub json join_timeout}}

{LAUNCH_HELP}"""


@dataclass(kw_only=True)
class DoctorOptions(JsonOptions, CacheOptions, OutputOptions):
    """Options of `python -m embedtrain doctor`."""

    quick: bool = False  # no bandwidth, no disk speed, no request to the Hub
    hub: bool = True  # send requests to the Hugging Face Hub, for some seconds at most
    join_timeout: float = option(120.0, above=0)  # seconds that ranks wait for each other


def compose_doctor(arguments: list[str]) -> DoctorOptions:
    """The options, checked. `--json` stands for `json=true`, `quick` for `quick=true`."""
    short = {"--json": "json=true", "quick": "quick=true", "--quick": "quick=true"}
    arguments = [short.get(argument, argument) for argument in arguments]
    options = compose_command("doctor", DoctorOptions, arguments, HELP)
    options.output_dir = options.output_dir or "runs"
    return options


Environment = dict[str, str]


def compose(arguments: list[str]) -> tuple[DoctorOptions, Environment]:
    """The options, and the environment before variables are removed from it."""
    return compose_doctor(arguments), dict(os.environ)


def run(arguments: tuple[DoctorOptions, Environment]) -> None:
    """Check this process, join the others, check the connections between ranks, and print the findings."""
    import json

    from embedtrain.commands.doctor.checks import check_collectively, check_locally
    from embedtrain.commands.doctor.host import Finding, Level, in_order, worst
    from embedtrain.distributed.world import joined_world, rank_from_environment
    from embedtrain.errors import EmbedtrainError
    from embedtrain.utils.formatting import one_line

    options, environment = arguments
    local, has_joined = check_locally(options, environment), False
    try:
        with joined_world(options.join_timeout) as world:
            has_joined = True
            findings, prints = check_collectively(options, world, local), world.is_main
    except (EmbedtrainError, RuntimeError) as error:  # of gloo and NCCL, such as a missing interface
        do = "See https://docs.pytorch.org/docs/stable/elastic/run.html for the launcher, and docs/several-hosts.md."
        failure = "a rank failed after joining" if has_joined else "the ranks could not join"
        problem = Finding("ranks", "process group", f"{failure}: {one_line(error)}", Level.problem, do)
        findings = in_order([*local, problem])
        reporting_rank = getattr(error, "reporting_rank", None)
        prints = rank_from_environment() == max(reporting_rank or 0, 0)  # -1: the ranks did not agree on one
    if prints and options.json:
        report = {"worst": worst(findings).value, "findings": [finding.as_json() for finding in findings]}
        print(json.dumps(report, indent=2))
    elif prints:
        print_findings(findings)
    if worst(findings) is Level.problem:
        raise SystemExit(1)


def print_findings(findings: "list[Finding]") -> None:
    """Print the findings by topic, each with what to do."""
    from collections import Counter

    from embedtrain.commands.doctor.host import Level
    from embedtrain.tracking.pages import Page
    from embedtrain.utils.formatting import format_count

    page = Page()
    for topic in dict.fromkeys(finding.topic for finding in findings):
        page.heading(topic)
        for finding in (finding for finding in findings if finding.topic == topic):
            where = f" ({finding.where})" if finding.where else ""
            style = {Level.problem: "bold red", Level.warning: "yellow"}.get(finding.level, "")
            page.facts([(finding.level.value.ljust(7), f"{finding.name}: {finding.text}{where}")], style)
            if finding.do:
                page.facts([(" " * 7, finding.do)])
    counts = Counter(finding.level for finding in findings)
    page.heading(f"{format_count(counts[Level.problem], 'problem')}, {format_count(counts[Level.warning], 'warning')}")
