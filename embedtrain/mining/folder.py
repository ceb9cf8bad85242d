"""The output directory of `mine` or `filter`, and intermediate files from which an interrupted run resumes.

    OUTPUT_DIR/NAME.jsonl          the written rows of each source
    OUTPUT_DIR/summary.json        statistics; written last
    OUTPUT_DIR/.mining/            identity.json, the prepared inputs, vectors, and a directory for each block of rows

A block is complete or absent: its directory gets its final name after every rank has written its part.
"""

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.compose import to_plain
from embedtrain.config.options import info, is_in_result
from embedtrain.data.sources.part_reader import PartReader
from embedtrain.data.sources.parts import SourcePart
from embedtrain.data.sources.values import shorten
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mining.options import RowSearchOptions
from embedtrain.mining.pool import MiningSource
from embedtrain.utils.files import Checksums, atomic_write, remove_tree, require_no_links

QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}


def quantiles(values: NDArray[Any]) -> dict[str, float] | None:
    """The quantiles of QUANTILES; None without values."""
    if not len(values):
        return None
    results = np.quantile(values.astype(np.float64), list(QUANTILES.values()))
    return dict(zip(QUANTILES, results.tolist(), strict=True))


SUMMARY = "summary.json"
_UNFINISHED = ".part"
_CHECKSUMS = ".checksums.json"  # of the files that a rank writes


def _digest(reader: PartReader, part: SourcePart) -> list[Any]:
    pictures = reader.pictures_version(part)  # that the file only names
    return reader.digests(part) + ([] if pictures is None else [pictures])


def mining_identity(
    options: RowSearchOptions,
    sources: Sequence[MiningSource],
    corpus: Sequence[SourcePart],
    model: dict[str, Any],
    teacher: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything that the written rows depend on, as JSON; `model` and `teacher` are of `model_identity`."""
    reader = PartReader()
    plain = to_plain(options)
    identity = {
        option.name: plain[option.name]
        for option in fields(options)
        # Blocks on disk have `query_batch_size` rows. Of models and rows the content counts, in other keys.
        if (is_in_result(option.name, options) or option.name == "query_batch_size")
        and not (info(option).is_input or info(option).is_revision)
    }
    identity["index"] = options.index.search_identity
    return {
        **identity,
        "data": {source.name: source.identity() for source in sources},
        "corpus": [_digest(reader, part) for part in corpus],
        "model": model,
        "teacher": teacher,
    }


def require_same_files(identity: dict[str, Any], world: World) -> None:
    """Raise DataError on every rank if a rank read something else than rank 0. A collective."""
    main = world.broadcast(identity)
    with world.fail_together("comparing the data of all ranks"):
        for option in ("data", "corpus"):
            if main[option] != identity[option]:
                raise DataError(
                    f"{option} has other contents on rank {world.rank} than on rank 0: "
                    "every node must see the same files under the same paths"
                )


class MiningFolder:
    """The output directory of one run, on a file system that all ranks share.

    `identity` is from `mining_identity`; `rows`, mined or filtered, is for messages, and `temporary` the name of the
    directory of intermediate files. What rank 0 wrote must become visible within `timeout` seconds: network file
    systems are slow to show it.
    """

    def __init__(
        self,
        output_dir: Path,
        identity: Mapping[str, Any],
        world: World,
        *,
        rows: str = "mined",
        temporary: str = ".mining",
        timeout: float = 40.0,
    ) -> None:
        self.output_dir, self.world, self._rows, self._timeout = output_dir, world, f"{rows} rows", timeout
        self._names: Sequence[str] = ()
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._temporary = output_dir / temporary
        self.inputs, self.vectors, self._blocks = (self._temporary / name for name in ("inputs", "vectors", "blocks"))

    def begin(self, names: Sequence[str]) -> bool:
        """Prepare to write files with these names, without suffix; returns False if all is done. A collective.

        Raises DataError if the directory holds rows of other options or files of other origin, or is not shared by all
        ranks.
        """
        self._names = names
        is_unfinished, marker = False, f"seen-{secrets.token_hex(8)}"
        with self.world.fail_together("opening output_dir"):
            if self.world.is_main:
                is_unfinished = self._begin(names)
                if is_unfinished:
                    (self._temporary / marker).touch()
        is_unfinished, marker = self.world.broadcast((is_unfinished, marker))
        if is_unfinished:
            self._require_visible(self._temporary / marker)
        return is_unfinished

    def _require_visible(self, marker: Path) -> None:
        is_visible = False
        with self.world.fail_together("looking for output_dir"):
            deadline = time.monotonic() + self._timeout
            while not (is_visible := marker.is_file()) and time.monotonic() < deadline:
                time.sleep(min(0.5, self._timeout / 10))
        visible = self.world.gather(is_visible)
        if not all(visible):
            raise DataError(
                f"output_dir={self.output_dir}: rank {visible.index(False)} does not see what rank 0 wrote there; "
                "it must be on a file system that all ranks share"
            )
        if self.world.is_main:
            marker.unlink(missing_ok=True)

    def _begin(self, names: Sequence[str]) -> bool:
        summary, identity = self.output_dir / SUMMARY, self._temporary / "identity.json"
        if summary.is_file():
            content = _read_json(summary)
            finished = content.get("identity") if isinstance(content, dict) else None
            if not isinstance(finished, dict):
                raise DataError(f"{summary} exists and is not a summary of {self._rows}: choose another output_dir")
            self._require_same(finished, self._rows)
            if identity.is_file():
                remove_tree(self._temporary)
            return False
        require_no_links(self._temporary)
        earlier = self._temporary / "prepared"  # what `inputs` was, with other names of files: they are collected again
        # Without either, nothing is lost by starting from scratch.
        if identity.is_file() and (self.inputs.is_dir() or earlier.is_dir()):
            self._require_same(_read_json(identity), f"partly {self._rows}")
            remove_tree(earlier)
            for unfinished in self._blocks.glob(f"*{_UNFINISHED}"):
                remove_tree(unfinished)
            return True
        for name in names:
            path = self.output_dir / f"{name}.jsonl"
            if path.exists():
                raise DataError(f"{path} exists and was not written by this command: choose another output_dir")
        foreign = None if identity.is_file() else next((p for p in self._temporary.rglob("*") if not p.is_dir()), None)
        if foreign is not None:
            raise DataError(f"{foreign} was not written by this command: move it away, or choose another output_dir")
        remove_tree(self._temporary)
        self._blocks.mkdir(parents=True)
        _write_json(identity, self.identity)
        return True

    def _require_same(self, other: object, content: str) -> None:
        for option, before, now in _differences(other, self.identity):
            raise DataError(
                f"output_dir={self.output_dir} holds {content} of another command: {option} was {_format(before)} and "
                f"is now {_format(now)}; use the same options to resume, choose another output_dir, or delete this one"
            )

    def finished_blocks(self) -> set[str]:
        """The names of complete blocks; damaged ones are removed. A collective.

        Rank 0 lists them, because the others may see the directory with delay.
        """
        names: list[str] = []
        with self.world.fail_together("listing finished blocks"):
            if self.world.is_main:
                names = sorted(path.name for path in self._blocks.iterdir() if path.is_dir())
        names = [name for name in self.world.broadcast(names) if not name.endswith(_UNFINISHED)]
        damaged: list[str] = []
        with self.world.fail_together("verifying finished blocks"):
            damaged = [name for name in names[self.world.rank :: self.world.size] if self._damage(name)]
        damaged = [name for local_names in self.world.gather(damaged) for name in local_names]
        with self.world.fail_together("removing damaged blocks"):
            if self.world.is_main and damaged:
                for name in damaged:
                    remove_tree(self._blocks / name)
                more = f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
                text = f"{self._blocks / damaged[0]}{more}: damaged, so its rows are searched again"
                print(text, file=sys.stderr, flush=True)
        return set(names) - set(damaged)

    def _damage(self, name: str) -> str | None:
        """The first damaged file of a block, or None."""
        block = self._blocks / name
        paths = sorted(block.glob(f"*{_CHECKSUMS}"))
        if not paths or len(paths) != int(paths[0].name.removesuffix(_CHECKSUMS).rpartition("-")[2]):
            return "."
        for path in paths:
            try:
                damaged = Checksums.read(path).damaged(block)
            except (OSError, ValueError):
                return path.name
            if damaged:
                return damaged[0]
        return None

    def write_block(self, name: str, write: Callable[[Path], Sequence[Path]]) -> None:
        """Write this rank's part of a block, whose rows follow those of the previous rank. A collective.

        `write` gets a path without suffix; it writes files with this path and any suffix, and returns them.
        """
        unfinished = self._blocks / f"{name}{_UNFINISHED}"
        with self.world.fail_together(f"writing {self._rows}"):
            unfinished.mkdir(parents=True, exist_ok=True)
            path = unfinished / f"{self.world.rank:06}-of-{self.world.size:06}"
            files = {file.name: entry for file in write(path) for entry in Checksums.of(file).files.values()}
            Checksums(files).write(path.with_suffix(_CHECKSUMS))
        with self.world.fail_together(f"writing {self._rows}"):
            if self.world.is_main:
                unfinished.rename(self._blocks / name)

    def block_files(self, blocks: Sequence[str], suffix: str) -> Iterator[Path]:
        """The verified files of blocks with this suffix, in the order of their rows."""
        for name in blocks:
            if (file := self._damage(name)) is not None:
                raise DataError(
                    f"{self._blocks / name / file} is damaged: start the same command again, which searches its rows"
                )
            yield from sorted((self._blocks / name).glob(f"*{suffix}"))

    def write_source(self, name: str, lines: Iterator[str]) -> None:
        """Write `NAME.jsonl` atomically; on one rank. The name may have a directory."""
        path = self.output_dir / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)

    def written_files(self) -> list[Path]:
        """The files of all sources."""
        return [self.output_dir / f"{name}.jsonl" for name in self._names]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as finished, and delete the intermediate files; on one rank."""
        _write_json(self.output_dir / SUMMARY, {**summary, "identity": self.identity})
        remove_tree(self._temporary)


def read_summary(output_dir: Path) -> dict[str, Any]:
    """The summary that `MiningFolder.finish` wrote."""
    content = _read_json(output_dir / SUMMARY)
    assert isinstance(content, dict)
    return {name: value for name, value in content.items() if name != "identity"}


def _differences(before: object, now: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """The dotted name and both values of each difference between two JSON values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *before]):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif before != now and not all(value is None or value is False for value in (before, now)):
        # An option that is off may be one that an earlier version did not have.
        yield name, before, now


def _format(value: object) -> str:
    return "not set" if value is None else shorten(value, 40)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): choose another output_dir") from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
