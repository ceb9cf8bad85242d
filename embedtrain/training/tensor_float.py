"""TF32 for a loss's matrix products on a GPU: operands of 10 bits, sums in fp32, at several times the speed of fp32.

Where a model computes in bf16 its vectors have 8 bits that mean something, and none of them is lost; the products
themselves leave as fp32. It holds for the loss alone and not for the process: rotary positions are a product of fp32
too, and angles of position 3000 rounded to 11 bits are other positions.
"""

import torch
from torch import nn

from embedtrain.config.schema import Precision


def products_in_tf32(loss: nn.Module, precision: Precision) -> None:
    """Let the loss's forward pass, which holds its large products and their gradients, use TF32 in bf16 runs.

    The setting is that of torch 2.9 and later; what was set before is set again after each pass. (Both ways to set it
    must not be mixed: torch refuses, and so does torch.compile, while this one is in force.)
    """
    if precision is not Precision.bf16:
        return
    before: list[str] = []

    def begin(*_: object) -> None:
        before.append(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def end(*_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = before.pop()

    loss.register_forward_pre_hook(begin)
    loss.register_forward_hook(end, always_call=True)
