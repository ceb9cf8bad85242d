"""The kinds of models: what each declares, and the only table of their names outside of `kinds/`.

A kind is one package under `kinds/`; its `__init__.py` imports no torch, and its methods import what they need when
they are called.
"""

import importlib
from abc import ABC
from functools import cache
from typing import ClassVar

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
    """

    name: ClassVar[str]
    summary: ClassVar[str]


@cache
def load_kind(name: str) -> Kind:
    """The kind that `model.kind` names."""
    module, _, attribute = _KINDS[name].partition(":")
    kind: Kind = getattr(importlib.import_module(module), attribute)()
    return kind


def kinds() -> tuple[Kind, ...]:
    """All kinds of the package."""
    return tuple(map(load_kind, _KINDS))
