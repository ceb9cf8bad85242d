"""Findings of the checks, and merging the findings of all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum

from embedtrain.distributed.watchdog.peers import format_ranks

TOPICS = ("versions", "devices", "ranks", "environment", "disks", "services")


class Level(str, Enum):
    """Severity: fine, good to know, slower or riskier than necessary, or prevents training."""

    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    topic: str  # one of TOPICS
    name: str  # what was checked, in a word or two
    text: str  # what was measured, or why it was not
    level: Level = Level.ok
    do: str = ""  # one sentence on what to do
    where: str = ""  # the ranks for which it holds; empty for all

    def as_json(self) -> dict[str, str]:
        """For `--json`."""
        return {**asdict(self), "level": self.level.value}


def merge_findings(findings_of_ranks: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Every finding once, with its ranks if it does not hold for all; findings and hosts are by rank."""
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(findings_of_ranks):
        for finding in dict.fromkeys(findings):
            ranks_of.setdefault(finding, []).append(rank)
    return in_order(
        finding if len(ranks) == len(findings_of_ranks) else replace(finding, where=format_ranks(ranks, hosts))
        for finding, ranks in ranks_of.items()
    )


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by topic; findings of one topic keep their order."""
    return sorted(findings, key=lambda finding: TOPICS.index(finding.topic))


def worst(findings: Iterable[Finding]) -> Level:
    """The most severe level."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.ok)
