"""embedtrain: train text-embedding models on one GPU, one node or many nodes.

`from embedtrain import train, evaluate, mine, export, load_encoder`: see `embedtrain.api`.
"""

import sys

# `python -m embedtrain` begins to look for modules in the working directory, where data of others may have a torch.py.
# Python has imported some of its own modules before: docs/trust.md. A program that imports this package keeps its path.
if (
    sys.argv[:1] == ["-m"]  # only while Python looks for the module
    and not sys.flags.safe_path
    and any(
        flag.startswith("-") and flag.endswith("m") and module.partition(".")[0] == "embedtrain"
        for flag, module in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )
):
    del sys.path[0]

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedtrain.api import evaluate, export, load_encoder, mine, train

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "export", "load_encoder", "mine", "train"]


class _Function:
    """A function of embedtrain.api, imported when it is first used: `import embedtrain` imports no torch."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, _module: object, _owner: type) -> Any:
        from embedtrain import api

        return getattr(api, self._name)

    def __set__(self, _module: object, value: object) -> None:
        """Ignore the package of the same name (embedtrain/evaluate), which Python sets when it is imported."""


class _Package(ModuleType):
    """This package, whose functions stay functions although the commands are packages of the same names."""

    train = _Function()
    evaluate = _Function()
    mine = _Function()
    export = _Function()
    load_encoder = _Function()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
