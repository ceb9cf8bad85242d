"""`python -m embedtrain.doctor`: is this machine fit to train? Under torchrun the same, for all ranks and between them.

The exit code is 1 where there is a problem, else 0.
"""

import os
from typing import TYPE_CHECKING

from embedtrain.cli import run_command
from embedtrain.doctor.options import DoctorOptions, compose_doctor

if TYPE_CHECKING:
    from embedtrain.doctor.finding import Finding


Asked = tuple[DoctorOptions, dict[str, str]]


def read(arguments: list[str]) -> Asked:
    """The options, and the environment before anything is taken out of it."""
    return compose_doctor(arguments), dict(os.environ)


def act(asked: Asked) -> None:
    """Look at this process, meet the others, look at what is between them, and tell."""
    import json

    from embedtrain.distributed.world import joined_world, rank_from_environment
    from embedtrain.doctor.examine import check_collectively, check_locally
    from embedtrain.doctor.finding import Finding, Level, in_order, worst
    from embedtrain.errors import EmbedtrainError
    from embedtrain.models.hub import one_line

    options, environment = asked
    alone, met = check_locally(options, environment), False
    try:
        with joined_world(options.timeout) as world:
            met = True
            findings, speaks = check_collectively(options, world, alone), world.is_main
    except (EmbedtrainError, RuntimeError) as error:  # of gloo and NCCL: an interface that is not there, a driver
        do = "See https://docs.pytorch.org/docs/stable/elastic/run.html for the launcher, and docs/several-hosts.md."
        said = "they have met, and one failed" if met else "they could not meet"
        findings = in_order(
            [*alone, Finding("ranks", "process group", f"{said}: {one_line(error)}", Level.problem, do)]
        )
        reporting_rank = getattr(error, "reporting_rank", None)
        speaks = rank_from_environment() == max(reporting_rank or 0, 0)  # -1: they have agreed on nobody
    if speaks and options.json:
        print(json.dumps({"worst": worst(findings).value, "findings": [one.as_json() for one in findings]}, indent=2))
    elif speaks:
        print_findings(findings)
    if worst(findings) is Level.problem:
        raise SystemExit(1)


def print_findings(findings: "list[Finding]") -> None:
    """A list by topic, and below each finding that is not ok what to do about it."""
    from collections import Counter

    from embedtrain.doctor.finding import Level
    from embedtrain.tracking.pages import Page

    page = Page()
    for topic in dict.fromkeys(finding.topic for finding in findings):
        page.heading(topic)
        for finding in (one for one in findings if one.topic == topic):
            where = f" ({finding.where})" if finding.where else ""
            style = {Level.problem: "bold red", Level.warning: "yellow"}.get(finding.level, "")
            page.facts([(finding.level.value.ljust(7), f"{finding.name}: {finding.text}{where}")], style)
            if finding.do:
                page.facts([(" " * 7, finding.do)])
    found = Counter(finding.level for finding in findings)
    page.heading(
        f"{found[Level.problem]} problem{'s' * (found[Level.problem] != 1)}, "
        f"{found[Level.warning]} warning{'s' * (found[Level.warning] != 1)}"
    )


if __name__ == "__main__":
    run_command(read, act)
