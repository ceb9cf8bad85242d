"""The output directory of mining: shared by all ranks, and complete, or an error."""

import random
from pathlib import Path

import numpy as np
import pytest

from embedtrain.commands.mine.miner import merge_in_row_order, read_lines, read_stats, write_mined
from embedtrain.commands.mine.stats import MiningStats
from embedtrain.distributed.world import World
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.mining.folder import MiningFolder


def begin(world: World, directory: Path, is_shared: bool) -> str:
    path = directory / ("shared" if is_shared else f"rank-{world.rank}")
    folder = MiningFolder(path, {"negatives": 3}, world, timeout=0.1)
    try:
        is_unfinished = folder.begin(["rows"])
        return f"unfinished: {is_unfinished}, {sorted(path.name for path in folder.inputs.parent.glob('seen-*'))}"
    except EmbedtrainError as error:
        return str(error)


def test_directory_of_one_machine_is_rejected(ranks, tmp_path):
    assert ranks(2, begin, tmp_path, True)[0] == "unfinished: True, []"
    for rank, message in enumerate(ranks(2, begin, tmp_path, False)):
        assert message.startswith(f"output_dir={tmp_path / f'rank-{rank}'}: rank 1 does not see what rank 0 wrote")


def test_a_folder_of_the_user_is_not_replaced(ranks, tmp_path):
    notes = tmp_path / "shared" / ".mining" / "blocks" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("of the user")
    (message,) = ranks(1, begin, tmp_path, True)
    assert f"{notes} was not written by this command" in message
    assert notes.read_text() == "of the user"


def test_blocks_of_a_version_with_another_layout_are_kept(ranks, tmp_path):
    folder = tmp_path / "shared" / ".mining"
    for name in ("prepared", "blocks/a-0", "vectors"):
        (folder / name).mkdir(parents=True)
    (folder / "identity.json").write_text('{"negatives": 3}')
    (folder / "blocks" / "a-0" / "rows.jsonl").write_text("{}")
    assert ranks(1, begin, tmp_path, True) == ["unfinished: True, []"]
    assert sorted(path.name for path in folder.iterdir()) == ["blocks", "identity.json", "vectors"]
    assert (folder / "blocks" / "a-0" / "rows.jsonl").exists()


@pytest.mark.parametrize("text", ["[1, 2]", '"text"', "{}", '{"identity": 3}'])
def test_other_files_are_not_overwritten(ranks, tmp_path, text):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "summary.json").write_text(text)
    (message,) = ranks(1, begin, tmp_path, True)
    assert "summary.json exists" in message
    assert "output_dir" in message
    assert (tmp_path / "shared" / "summary.json").read_text() == text


def write_and_lose(world: World, directory: Path) -> tuple[set[str], list[str], str]:
    folder = MiningFolder(directory / "out", {}, world)
    folder.begin(["rows"])
    folder.write_block("block", lambda path: write_mined(path, [f"line of {world.rank}"], MiningStats.merge([])))
    world.barrier()
    finished, lines, message = folder.finished_blocks(), list(read_lines(folder, ["block"])), ""
    world.barrier()
    if world.is_main:
        next(directory.glob("out/.mining/blocks/block/*1-of-*.jsonl")).unlink()
        try:
            list(read_lines(folder, ["block"]))
        except DataError as error:
            message = str(error)
    return finished, lines, message


def test_incomplete_block_is_named(ranks, tmp_path):
    (finished, lines, message), _ = ranks(2, write_and_lose, tmp_path)
    assert finished == {"block"}
    assert lines == ["line of 0\n", "line of 1\n"]
    assert "blocks/block/000001-of-000002.jsonl is damaged" in message


def flip_bits(world: World, directory: Path, count: int) -> list[int]:
    """Flip one bit of a block at a time; returns the flips after which it was not mined again."""
    folder = MiningFolder(directory / "out", {}, world)
    folder.begin(["rows"])
    draw, undetected = random.Random(0), []
    for number in range(count):
        if "block" not in folder.finished_blocks():
            folder.write_block("block", lambda path: write_mined(path, ["first", "second"], MiningStats.merge([])))
        if number % 2:
            assert list(read_lines(folder, ["block"])) == ["first\n", "second\n"]
            read_stats(folder, ["block"])
        paths = sorted((directory / "out" / ".mining" / "blocks" / "block").iterdir())
        path = paths[number % len(paths)]
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        if folder.finished_blocks():
            undetected.append(number)
    return undetected


def test_damaged_blocks_are_mined_again(ranks, tmp_path, capfd):
    assert ranks(1, flip_bits, tmp_path, 300) == [[]]


def test_missing_rows_are_an_error():
    with pytest.raises(DataError, match="missing after the first 1 of 2"):
        list(merge_in_row_order(np.zeros(2, dtype=np.int64), {0: iter(["a\n"])}))
