"""The folder that mining leaves behind: on a file system of all ranks, and whole, or one sentence."""

from pathlib import Path

import numpy as np
import pytest

from embedtrain.distributed.world import World
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.mine.blocks import merge_in_row_order
from embedtrain.mine.figures import MiningStats
from embedtrain.mine.work import MiningFolder


def begin(world: World, folder: Path, is_shared: bool) -> str:
    work = MiningFolder(folder / ("to" if is_shared else f"rank-{world.rank}"), {"negatives": 3}, world, patience=0.1)
    try:
        return f"left: {work.begin(['rows'])}, {sorted(path.name for path in work.prepared.parent.glob('seen-*'))}"
    except EmbedtrainError as error:
        return str(error)


def test_a_folder_of_one_machine_alone_is_refused(ranks, tmp_path):
    assert ranks(2, begin, tmp_path, True)[0] == "left: True, []"
    told = ranks(2, begin, tmp_path, False)
    for rank in range(2):
        where = f"output_dir={tmp_path / f'rank-{rank}'}: rank 1 does not see what rank 0 wrote there"
        assert told[rank] == f"{where}; it must be on a file system that all ranks share"


@pytest.mark.parametrize("text", ["[1, 2]", '"text"', "{}", '{"identity": 3}'])
def test_a_summary_of_something_else_is_left_alone(ranks, tmp_path, text):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "summary.json").write_text(text)
    (told,) = ranks(1, begin, tmp_path, True)
    assert "summary.json is there already, and is not that of mined rows: write another folder as output_dir=" in told
    assert (tmp_path / "to" / "summary.json").read_text() == text


def write_and_lose(world: World, folder: Path) -> tuple[set[str], list[str], str]:
    work = MiningFolder(folder / "to", {}, world)
    work.begin(["rows"])
    work.write("block", [f"line of {world.rank}"], MiningStats.joined([]))
    world.barrier()
    done, lines, told = work.done(), list(work.lines(["block"])), ""
    world.barrier()
    if world.is_main:
        next(folder.glob("to/.mining/blocks/block/*1-of-*.jsonl")).unlink()
        try:
            list(work.lines(["block"]))
        except DataError as error:
            told = str(error)
    return done, lines, told


def test_a_block_that_lost_a_part_is_named(ranks, tmp_path):
    (done, lines, told), _ = ranks(2, write_and_lose, tmp_path)
    assert done == {"block"}
    assert lines == ["line of 0\n", "line of 1\n"]
    assert "blocks/block is not whole: delete it, and the same command mines its rows again" in told


def test_rows_that_are_missing_are_no_traceback():
    with pytest.raises(DataError, match="missing after the first 1 of 2"):
        list(merge_in_row_order(np.zeros(2, dtype=np.int64), {0: iter(["a\n"])}))
