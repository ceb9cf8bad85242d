"""What decides about mined rows, so that what was begun goes on by the same means or not at all."""

from collections.abc import Sequence
from typing import Any

from embedtrain.config.compose import to_plain
from embedtrain.data.sources.parts import Part
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mine.documents import corpus_digests
from embedtrain.mine.options import MineOptions
from embedtrain.mine.sources import MiningSource

# Where things lie, how fast they go and how much memory they take; what these name is told by its content.
_WITHOUT = {
    "output_dir",
    "data",
    "corpus",
    "model",
    "teacher",
    "revision",
    "teacher_revision",
    "cache_dir",
    "timeout",
    "unshard",
    "chunk_tokens",
    "teacher_batch_size",
    "trust_remote_code",
}


def mining_identity(
    options: MineOptions,
    sources: Sequence[MiningSource],
    corpus: Sequence[Part],
    model: dict[str, Any],
    teacher: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything that decides which rows are written, as JSON.

    Args:
        options: of the door.
        sources: what is mined.
        corpus: what is searched besides.
        model: what `model_identity` says of the model.
        teacher: likewise; None where there is none.

    Raises:
        DataError: a file of a corpus cannot be read.
    """
    plain = {name: value for name, value in to_plain(options).items() if name not in _WITHOUT}
    plain["index"] = plain["index"]["dtype"]
    return {
        **plain,
        "data": {source.name: source.identity() for source in sources},
        "corpus": corpus_digests(corpus),
        "model": model,
        "teacher": teacher,
    }


def require_same_files(identity: dict[str, Any], world: World) -> None:
    """Refuse ranks that see other files. A collective.

    Raises:
        DataError: on every rank but the first.
    """
    main = world.broadcast(identity)
    with world.fail_together("comparing what the ranks read"):
        for what in ("data", "corpus"):
            if main[what] != identity[what]:
                raise DataError(
                    f"{what} holds something else on rank {world.rank} than on rank 0: "
                    "every node must see the same files under the same paths"
                )
