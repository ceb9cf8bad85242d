"""Findings of the checks, and merging the findings of all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
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
    """The result of one check.

    Attributes:
        topic: the group, such as "disks".
        name: what was checked, in a word or two.
        text: what was measured, or why it was not.
        level: of severity.
        do: one sentence on what to do; empty if nothing.
        where: the ranks for which it holds; empty for all.
    """

    topic: str
    name: str
    text: str
    level: Level = Level.ok
    do: str = ""
    where: str = ""

    def as_json(self) -> dict[str, str]:
        """For `--json`."""
        return {**asdict(self), "level": self.level.value}


def merged(findings_of_ranks: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Every finding once, with its ranks if it does not hold for all.

    Args:
        findings_of_ranks: by rank.
        hosts: by rank.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(findings_of_ranks):
        for finding in dict.fromkeys(findings):
            ranks_of.setdefault(finding, []).append(rank)
    findings_once = [
        finding
        if len(ranks) == len(findings_of_ranks)
        else Finding(**{**asdict(finding), "where": format_ranks(ranks, hosts)})
        for finding, ranks in ranks_of.items()
    ]
    return in_order(findings_once)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by topic; findings of one topic keep their order."""
    return sorted(findings, key=lambda finding: TOPICS.index(finding.topic))


def worst(findings: Iterable[Finding]) -> Level:
    """The most severe level."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.ok)
