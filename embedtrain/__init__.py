"""embedtrain: train text-embedding models on one GPU, one node or many nodes.

    from embedtrain import train, evaluate, load_encoder

`help(embedtrain.train)` explains a function with all of its options: `train`, `evaluate`, `mine`, `filter`, `split`,
`search`, `plan`, `synthesize`, `export`, `load_encoder`.
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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedtrain.api import evaluate, export, filter, load_encoder, mine, plan, search, split, synthesize, train

__version__ = "0.2.0"
__all__ = [
    "__version__",
    "evaluate",
    "export",
    "filter",
    "load_encoder",
    "mine",
    "plan",
    "search",
    "split",
    "synthesize",
    "train",
]
_FUNCTIONS = __all__[1:]


def __getattr__(name: str) -> Any:
    """A function of embedtrain.api, imported when it is first used: `import embedtrain` imports no torch."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from embedtrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
