"""The end of mining: a file for each source, put together of its blocks, and the summary."""

from typing import Any

from embedtrain.mine.blocks import merge_in_row_order, row_blocks
from embedtrain.mine.figures import MiningStats
from embedtrain.mine.miner import Miner


def finish(miner: Miner) -> dict[str, Any]:
    """Write what all blocks hold together, and take the blocks away. A collective.

    Returns:
        The summary, on every rank: what was found of each source, and the worst suspects of all.
    """
    work, world, prepared, options = miner.work, miner.world, miner.prepared, miner.options
    blocks = row_blocks(prepared.format_of, options.query_batch_size)
    summary: dict[str, Any] = {}
    # One rank alone: what another has just written may not be in a rank's view of a network's file system yet.
    with world.fail_together("writing mined files"):
        if world.is_main:
            for number, source in enumerate(miner.sources):
                own = [block for block in blocks if block.source == number]
                lines = {
                    wording: work.lines([block.name for block in own if block.wording == wording])
                    for wording in {block.wording for block in own}
                }
                work.put(source.name, merge_in_row_order(prepared.format_of[number], lines))
    with world.fail_together("writing the summary"):
        if world.is_main:
            each = [
                work.figures([block.name for block in blocks if block.source == number])
                for number in range(len(miner.sources))
            ]
            whole = MiningStats.joined(each)
            names = [source.name for source in miner.sources]
            summary = {
                "documents": len(prepared.pool),
                "negatives_wanted": options.negatives,
                "rank_max": options.rank_max,
                "sources": {
                    name: {"file": f"{name}.jsonl", **figures.summary(options.negatives)}
                    for name, figures in zip(names, each, strict=True)
                },
                "suspected_false_negatives": [vars(suspect) for suspect in whole.false_negatives],
                "suspected_wrong_labels": [vars(suspect) for suspect in whole.wrong_labels],
            }
            work.finish(summary)
    return world.broadcast(summary)
