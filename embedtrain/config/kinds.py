"""The kinds of models: what each declares, and the only table of their names outside of `kinds/`.

A kind is one package under `kinds/`; its `__init__.py` imports no torch, and its methods import what they need when
they are called.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource

_KINDS = {
    "dense": "embedtrain.kinds.dense:Dense",
    "cross_encoder": "embedtrain.kinds.cross_encoder:CrossEncoder",
    "late_interaction": "embedtrain.kinds.late_interaction:LateInteraction",
    "m3": "embedtrain.kinds.m3:M3",
    "sparse": "embedtrain.kinds.sparse:Sparse",
}


class Kind(ABC):
    """Everything in which one kind of model differs from others.

    Attributes:
        name: the value of `model.kind`.
        summary: what the model computes, in a few words.
        own_losses: classes, as "module:Class", of losses that only this kind has, by `loss.name`; an instance is made
            of the options and the score.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    own_losses: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def score(self, source: "ModelSource") -> "Score":
        """How two texts that the model has encoded compare, in training and in search."""


@cache
def load_kind(name: str) -> Kind:
    """The kind that `model.kind` names."""
    kind: Kind = _load(_KINDS[name])()
    return kind


def kinds() -> tuple[Kind, ...]:
    """All kinds of the package."""
    return tuple(map(load_kind, _KINDS))


def own_loss(name: str) -> Callable[..., Any] | None:
    """The class of a loss that only one kind has, by `loss.name`; None for other losses."""
    paths = {loss: path for kind in kinds() for loss, path in kind.own_losses.items()}
    return _load(paths[name]) if name in paths else None


def _load(path: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
