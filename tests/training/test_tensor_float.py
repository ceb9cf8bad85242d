"""TF32 is for a loss's products in bf16 runs, and for nothing else."""

import pytest
import torch
from torch import nn

from embedtrain.config.recipe import Precision
from embedtrain.losses.similarity import rounding_tolerance
from embedtrain.training.setup import use_tf32_products


class Looking(nn.Module):
    """A loss that notes what is in force while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, fails: bool) -> None:
        self.seen.append(torch.backends.cuda.matmul.fp32_precision)
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize(("precision", "inside"), [(Precision.bf16, "tf32"), (Precision.fp32, "ieee")])
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_in_force_while_the_loss_computes(precision, inside, fails):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        loss = Looking()
        use_tf32_products(loss, precision)
        for _ in range(2):
            if fails:
                with pytest.raises(ZeroDivisionError):
                    loss(True)
            else:
                loss(False)
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            # torch.compile and the evaluation's search ask in the other way, which refuses when ways are mixed.
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert loss.seen == [inside] * 2
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_rounded_products_leave_room_for_rounding():
    """A document equal to the positive is judged alike, whether by a product of matrices or by a sum."""
    random = torch.Generator("cuda").manual_seed(0)
    vectors = torch.randn(4096, 1024, generator=random, device="cuda")
    vectors = torch.nn.functional.normalize(vectors + 3 * vectors[:1], dim=1)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        off = ((vectors @ vectors.T) - (vectors.double() @ vectors.double().T)).abs().max()
        assert off < rounding_tolerance(vectors)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert 16 * torch.finfo(torch.float32).eps < off, "TF32 was in force"
    assert rounding_tolerance(vectors) == 16 * torch.finfo(torch.float32).eps
