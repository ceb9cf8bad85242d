"""What decides the course of a run: options and rows that a resumed run must share, and all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from embedtrain.config.compose import to_plain
from embedtrain.config.losses import LossConfig
from embedtrain.config.schema import Recipe
from embedtrain.data.batches import TrainData
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import DataError


def identity_of(
    recipe: Recipe, data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> dict[str, Any]:
    """The options that decide what is learnt from which rows in which order: a resumed run must share them.

    Of training files their content counts, not their place.
    """
    model = to_plain(recipe.model)
    rows = {
        name: {
            "rows": f"{len(store)} {store.content}",
            **to_plain(given),
            "loss": None if loss == recipe.loss else to_plain(loss),
        }
        for name, store, given, loss in zip(data.names, data.stores, data.given, losses, strict=True)
    }
    return {
        "seed": recipe.seed,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.accumulation": recipe.train.accumulation,
        "loss": to_plain(recipe.loss),
        "prompts": {name: prompts.get(name, "") for name in ("query", "document")},
        "data.train": rows,
        "rows of an epoch": data.plan.rows_per_source.tolist(),
        "data.batches": "by_source" if data.plan.by_source else "mixed",
        **{f"model.{key}": value for key, value in model.items() if not key.endswith("_prompt")},
    }


def require_same_data(data: TrainData, world: World) -> None:
    """Refuse files that are not the same on all nodes: ranks would take other rows for one batch.

    Raises:
        DataError: on every rank alike.
    """
    found = world.gather([(store.report.name, store.content) for store in data.stores])
    for rank, other in enumerate(found):
        mine, its = [name for name, _ in found[0]], [name for name, _ in other]
        if mine != its:
            name = next(iter(set(mine) ^ set(its)), "their order")
            raise DataError(
                f"data.train: rank {rank} finds other files than rank 0 ({name}): they must be the same on all nodes"
            )
        for (name, first), (_, content) in zip(found[0], other, strict=True):
            if first != content:
                raise DataError(
                    f"data.train: {name} holds other rows on rank {rank} than on rank 0: its files must be the same on "
                    "all nodes"
                )


def require_same_tokenizer(tokenizer: TextTokenizer, world: World) -> None:
    """Refuse tokenizers that are not the same on all nodes: ranks would find other lengths, and other texts theirs.

    Raises:
        DataError: on every rank alike.
    """
    found = world.gather(tokenizer.fingerprint)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise DataError(
                f"rank {rank} has another tokenizer than rank 0: the model's files must be the same on all nodes"
            )
