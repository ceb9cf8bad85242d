"""What is found of a machine, and how what ranks find alike is told once."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from embedtrain.distributed.watchdog.peers import format_ranks

TOPICS = ("versions", "devices", "ranks", "environment", "disks", "services")


class Level(str, Enum):
    """How grave a finding is: nothing to do, worth knowing, slower or riskier than need be, or in the way."""

    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: the group it is told in, such as "disks".
        name: what was looked at, in a word or two.
        text: what was found: measured, or why it was not.
        level: how grave it is.
        do: one sentence, what to do; empty where nothing is to be done.
        where: the ranks it holds for, in words; empty for all.
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


def merged(of_ranks: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Every finding once, with the ranks that have it where not all do.

    Args:
        of_ranks: the findings of each rank.
        hosts: of each rank.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(of_ranks):
        for finding in dict.fromkeys(findings):
            ranks_of.setdefault(finding, []).append(rank)
    told = [
        finding if len(ranks) == len(of_ranks) else Finding(**{**asdict(finding), "where": format_ranks(ranks, hosts)})
        for finding, ranks in ranks_of.items()
    ]
    return in_order(told)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By topic, as they are read; within one as they came."""
    return sorted(findings, key=lambda finding: TOPICS.index(finding.topic))


def worst(findings: Iterable[Finding]) -> Level:
    """The gravest level among findings."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.ok)
