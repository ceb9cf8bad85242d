"""What `model.rope_scaling` may hold, as far as that can be told without the model."""

import math
from collections.abc import Mapping
from typing import Any

# Each type, and whether transformers keeps beside it how many positions the model was trained with.
ROPE_TYPES = {"yarn": True, "linear": False, "llama3": True}
# Their frequencies follow the longest text of a forward pass.
_BY_BATCH = ("dynamic", "longrope")
_EXAMPLE = "model.rope_scaling={rope_type: yarn, factor: 4}"


def rope_problem(scaling: Any) -> str | None:
    """The sentence to say of a `model.rope_scaling` that cannot work; None where none of it is wrong."""
    if not isinstance(scaling, Mapping):
        return f"model.rope_scaling={scaling!r}: a mapping with rope_type and factor, such as {_EXAMPLE}"
    kind = scaling.get("rope_type")
    if kind in _BY_BATCH:
        return (
            f"model.rope_scaling: rope_type={kind} turns positions by the longest text of a batch, so that a text's "
            f"vector would depend on the texts beside it: write one of {', '.join(ROPE_TYPES)}"
        )
    if kind not in ROPE_TYPES:
        return f"model.rope_scaling: rope_type={kind} is not one of {', '.join(ROPE_TYPES)}, as in {_EXAMPLE}"
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 1):
        return f"model.rope_scaling: factor={factor} is how many times further positions reach: a number above 1"
    original = scaling.get("original_max_position_embeddings")
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        return (
            f"model.rope_scaling: original_max_position_embeddings={original} is a number of positions; left out, the "
            "model's own is taken"
        )
    return None
