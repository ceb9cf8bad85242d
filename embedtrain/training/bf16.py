"""Whether a processor multiplies in bf16 itself, and what is said where it does not."""

from collections.abc import Mapping

import torch

from embedtrain.config.schema import Precision

# By torch's names: AMX and AVX512 of x86, and what ARM has. Others turn bf16 into fp32 and back for every product.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


def notes_on_bf16(
    precision: Precision, device: torch.device, capabilities: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """A line for a run that would be faster in fp32.

    Args:
        precision: of the run.
        device: that computes.
        capabilities: of the processor; default: those of this one, where torch tells them (from 2.12 on).
    """
    if precision is not Precision.bf16 or device.type != "cpu":
        return ()
    if capabilities is None:
        asked = getattr(torch.cpu, "get_capabilities", None)
        capabilities = None if asked is None else asked()
    if not capabilities or any(capabilities.get(name) for name in _INSTRUCTIONS):
        return ()
    return (
        "this processor has no instructions for bf16 (AMX, AVX512-BF16): parallel.precision=fp32 is faster on it, and "
        "more exact",
    )
