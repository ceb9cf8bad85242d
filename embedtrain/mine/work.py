"""The folder that mining leaves behind, and what lies in it until all is done, so that mining that was stopped goes on.

    TO/NAME.jsonl          the mined rows of each source
    TO/summary.json        what was found; written last
    TO/.mining/            identity.json, what was prepared, vectors, and a folder for each block of rows

A block is whole or not there: its folder gets its name when every rank has written its share.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embedtrain.data.sources.values import shorten
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.files import atomic_write
from embedtrain.mine.figures import MiningStats

SUMMARY = "summary.json"
_UNFINISHED = ".part"


class MiningFolder:
    """Mining into one folder.

    Args:
        to: seen by all ranks.
        identity: what decides about what is found, as JSON; the same on every rank.
        world: the ranks.
        patience: seconds for which a rank looks for what rank 0 wrote; network file systems show it late.

    Attributes:
        prepared: where what is made of all rows lies.
        vectors: where documents' vectors lie.
    """

    def __init__(self, to: Path, identity: Mapping[str, Any], world: World, *, patience: float = 40.0) -> None:
        self.to, self.world, self._patience = to, world, patience
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._own = to / ".mining"
        self.prepared, self.vectors, self._blocks = (self._own / name for name in ("prepared", "vectors", "blocks"))

    def begin(self, names: Sequence[str]) -> bool:
        """Make ready to begin or to go on; False where all is done already. A collective.

        Args:
            names: of the files that will be written, without their ending.

        Raises:
            DataError: the folder holds what was mined by other means, or files that are not ours, or is not the same
                on all ranks.
        """
        is_left, sign = False, f"seen-{secrets.token_hex(8)}"
        with self.world.fail_together("opening the folder to mine into"):
            if self.world.is_main:
                is_left = self._begin(names)
                if is_left:
                    (self._own / sign).touch()
        is_left, sign = self.world.broadcast((is_left, sign))
        if is_left:
            self._require_seen(self._own / sign)
        return is_left

    def _require_seen(self, sign: Path) -> None:
        is_seen = False
        with self.world.fail_together("looking for the folder to mine into"):
            end = time.monotonic() + self._patience
            while not (is_seen := sign.is_file()) and time.monotonic() < end:
                time.sleep(min(0.5, self._patience / 10))
        seen = self.world.gather(is_seen)
        if not all(seen):
            raise DataError(
                f"output_dir={self.to}: rank {seen.index(False)} does not see what rank 0 wrote there; "
                "it must be on a file system that all ranks share"
            )
        if self.world.is_main:
            sign.unlink(missing_ok=True)

    def _begin(self, names: Sequence[str]) -> bool:
        summary, identity = self.to / SUMMARY, self._own / "identity.json"
        if summary.is_file():
            read = _read(summary)
            before = read.get("identity") if isinstance(read, dict) else None
            if not isinstance(before, dict):
                raise DataError(
                    f"{summary} is there already, and is not that of mined rows: write another folder as output_dir="
                )
            self._require_same(before, "mined rows")
            shutil.rmtree(self._own, ignore_errors=True)
            return False
        if identity.is_file() and self.prepared.is_dir():  # else nothing was done yet that another command could harm
            self._require_same(_read(identity), "the beginning of mined rows")
            for unfinished in self._blocks.glob(f"*{_UNFINISHED}"):
                shutil.rmtree(unfinished)
            return True
        for name in names:
            if (self.to / f"{name}.jsonl").exists():
                raise DataError(
                    f"{self.to / f'{name}.jsonl'} is there already, and was not mined: choose another output_dir"
                )
        shutil.rmtree(self._own, ignore_errors=True)
        self._blocks.mkdir(parents=True)
        _write(identity, self.identity)
        return True

    def _require_same(self, before: object, what: str) -> None:
        for option, value, now in _differences(before, self.identity):
            raise DataError(
                f"output_dir={self.to} holds {what} of another command: "
                f"{option} was {_told(value)}, and is {_told(now)} "
                "now; "
                "write the same options to go on, or another folder, or delete this one"
            )

    def done(self) -> set[str]:
        """The blocks that are done. A collective: rank 0 says so, for ranks may see different ages of a folder."""
        there: list[str] = []
        with self.world.fail_together("looking at what is mined already"):
            if self.world.is_main:
                there = sorted(path.name for path in self._blocks.iterdir() if path.is_dir())
        return {name for name in self.world.broadcast(there) if not name.endswith(_UNFINISHED)}

    def write(self, block: str, lines: Sequence[str], figures: MiningStats) -> None:
        """Keep this rank's share of a block, whose rows follow those of the ranks before. A collective."""
        unfinished = self._blocks / f"{block}{_UNFINISHED}"
        with self.world.fail_together("writing mined rows"):
            unfinished.mkdir(parents=True, exist_ok=True)
            path = unfinished / f"{self.world.rank:06}-of-{self.world.size:06}.jsonl"
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            figures.write(path)
        with self.world.fail_together("writing mined rows"):
            if self.world.is_main:
                unfinished.rename(self._blocks / block)

    def lines(self, blocks: Sequence[str]) -> Iterator[str]:
        """The lines of some blocks, with their ends.

        Raises:
            DataError: a part of one is gone.
        """
        for path in self._parts(blocks):
            with path.open(encoding="utf-8", newline="\n") as file:
                yield from file

    def figures(self, blocks: Sequence[str]) -> MiningStats:
        """What was found in some blocks.

        Raises:
            DataError: a part of one is gone.
        """
        return MiningStats.joined([MiningStats.read(path) for path in self._parts(blocks)])

    def _parts(self, blocks: Sequence[str]) -> Iterator[Path]:
        for block in blocks:
            paths = sorted((self._blocks / block).glob("*.jsonl"))
            if not paths or len(paths) != int(paths[0].stem.rpartition("-")[2]):
                raise DataError(
                    f"{self._blocks / block} is not whole: delete it, and the same command mines its rows again"
                )
            yield from paths

    def put(self, name: str, lines: Iterator[str]) -> None:
        """Write a source's file, whole or not at all; on one rank."""
        path = self.to / f"{name}.jsonl"
        with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Say that all is done, and take away what was only for the time between; on one rank."""
        _write(self.to / SUMMARY, {**summary, "identity": self.identity})
        shutil.rmtree(self._own, ignore_errors=True)


def _differences(before: object, now: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """What differs between two values of JSON: where, and both."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *before]):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif before != now:
        yield name, before, now


def _told(value: object) -> str:
    return "nothing" if value is None else shorten(value, 40)


def _read(path: Path) -> object:
    try:
        facts: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): write another folder as output_dir=") from None
    return facts


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
