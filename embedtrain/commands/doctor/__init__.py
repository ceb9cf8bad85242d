"""`python -m embedtrain doctor`: checks whether a machine, or under torchrun all hosts, are ready for training.

The exit code is 1 if there is a problem, else 0.
"""

import os
from typing import TYPE_CHECKING

from embedtrain.commands.doctor.options import DoctorOptions, compose_doctor

if TYPE_CHECKING:
    from embedtrain.commands.doctor.finding import Finding

__all__ = ["DoctorOptions", "compose", "run"]


Environment = dict[str, str]


def compose(arguments: list[str]) -> tuple[DoctorOptions, Environment]:
    """The options, and the environment before variables are removed from it."""
    return compose_doctor(arguments), dict(os.environ)


def run(arguments: tuple[DoctorOptions, Environment]) -> None:
    """Check this process, join the others, check the connections between ranks, and print the findings."""
    import json

    from embedtrain.commands.doctor.checks import check_collectively, check_locally
    from embedtrain.commands.doctor.finding import Finding, Level, in_order, worst
    from embedtrain.distributed.world import joined_world, rank_from_environment
    from embedtrain.errors import EmbedtrainError
    from embedtrain.models.hub import one_line

    options, environment = arguments
    local, has_joined = check_locally(options, environment), False
    try:
        with joined_world(options.timeout) as world:
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

    from embedtrain.commands.doctor.finding import Level
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
