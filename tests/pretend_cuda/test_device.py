"""The pretended device itself: it refuses and counts what a GPU would refuse and wait for."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from embedtrain.distributed.world import World
from tests.pretend_cuda.device import collectives, host_reads

MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda here, there: here + there,
    "matmul": lambda here, there: here @ there,
    "stack": lambda here, there: torch.stack([here.sum(), there.sum()]),
    "cat": lambda here, there: torch.cat([here, there]),
    "copy of a number": lambda here, there: torch.cat([here.sum()[None], there.sum()[None]]),
    "out": lambda here, there: torch.mul(here, here, out=there),
    "index on the device": lambda here, there: there[here[0].long()],
    "values": lambda here, there: here.index_add_(0, torch.tensor([0, 1], device="cuda"), there),
    "foreach": lambda here, there: torch._foreach_add([here], [there]),
    "collective": lambda here, there: dist.all_gather([there], here),
    "numpy": lambda here, there: here.numpy(),
}


def mixed(world: World) -> dict[str, str]:
    """What each operation of a tensor on the device and one on the CPU raises."""
    raised = {}
    for name, operation in MIXED.items():
        try:
            operation(torch.eye(2, device="cuda"), torch.eye(2))
        except (RuntimeError, TypeError) as error:
            raised[name] = str(error)
    return raised


def test_operations_that_mix_devices_raise(cuda_ranks):
    (raised,) = cuda_ranks(1, mixed)
    assert raised.keys() == MIXED.keys()
    assert all("cuda:0" in error for error in raised.values())


ALONE: dict[str, tuple[int, Callable[[Tensor, Tensor], object]]] = {
    "item": (1, lambda here, there: here.sum().item()),
    "float": (1, lambda here, there: float(here[0, 0])),
    "condition": (1, lambda here, there: bool(here.any())),
    "tolist": (1, lambda here, there: here.tolist()),
    "cpu": (1, lambda here, there: here.cpu()),
    "cpu, later": (0, lambda here, there: here.to("cpu", non_blocking=True)),
    "copy to a buffer": (1, lambda here, there: there.copy_(here)),
    "copy to a buffer, later": (0, lambda here, there: there.pin_memory().copy_(here, non_blocking=True)),
    "copy to a buffer that is not page-locked": (1, lambda here, there: there.copy_(here, non_blocking=True)),
    "upload": (1, lambda here, there: there.to("cuda")),
    "upload, not page-locked": (1, lambda here, there: there.to("cuda", non_blocking=True)),
    "upload, page-locked": (0, lambda here, there: there.pin_memory().to("cuda", non_blocking=True)),
    "upload, part of a page-locked block": (
        0,
        lambda here, there: there.pin_memory()[1:].to("cuda", non_blocking=True),
    ),
    "numbers": (1, lambda here, there: torch.tensor([1, 2], device="cuda")),
    "mask": (1, lambda here, there: here[here > 0]),
    "filled": (0, lambda here, there: here.masked_fill_(here > 0, 2.0)),
    "assigned": (0, lambda here, there: here.__setitem__(here > 0, 2.0)),
    "rows": (0, lambda here, there: here[torch.arange(2, device="cuda")]),
    "rows by the CPU": (1, lambda here, there: here[torch.arange(2)]),
    "unique": (1, lambda here, there: here.unique()),
    "number on the CPU": (0, lambda here, there: here * there.sum()),
    "event": (1, lambda here, there: torch.cuda.Event().synchronize()),
    "device": (1, lambda here, there: torch.cuda.synchronize()),
    "arithmetic": (0, lambda here, there: F.normalize(here @ here, dim=1).sum(dim=0)),
    "on the CPU": (0, lambda here, there: there.sum().item()),
}


def counted(world: World) -> tuple[dict[str, int], set[str], dict[str, int]]:
    """The number of host reads of each operation, their lines, and the collectives of a sum."""
    numbers, lines = {}, set[str]()
    for name, (_, operation) in ALONE.items():
        here, there = torch.eye(2, device="cuda"), torch.eye(2)
        with host_reads() as reads:
            operation(here, there)
        numbers[name] = reads.total()
        lines |= {line.split(":")[0] for line in reads}
    with collectives() as calls:
        dist.all_reduce(torch.ones(2, device="cuda"))
        dist.all_reduce(torch.ones(2))
    return numbers, lines, dict(calls)


def test_host_reads_and_collectives_are_counted(cuda_ranks):
    ((numbers, lines, calls),) = cuda_ranks(1, counted)
    assert numbers == {name: number for name, (number, _) in ALONE.items()}
    assert lines == {"tests/pretend_cuda/test_device.py"}
    assert calls == {"cuda allreduce_": 1, "cpu allreduce_": 1}


def attention_gradients(world: World, window: tuple[int, int]) -> tuple[float, float]:
    """The largest difference of output and of gradients to torch's plain attention in float32, text by text."""
    torch.manual_seed(0)
    lengths = [5, 1, 7]
    starts = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    parts = [torch.randn(13, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    grad = torch.randn(13, 4, 8, dtype=torch.bfloat16)
    on_cuda = [part.to("cuda").requires_grad_() for part in parts]
    output = varlen_attn(
        *on_cuda, starts.to("cuda"), starts.to("cuda"), 7, 7, window_size=window, scale=0.3, enable_gqa=True
    )
    output.backward(grad.to("cuda"))
    plain = [part.float().requires_grad_() for part in parts]
    outputs = []
    for q, k, v in zip(*(part.split(lengths) for part in plain), strict=True):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        mask = torch.ones_like(distance, dtype=torch.bool)
        mask &= (distance <= window[0]) if window[0] >= 0 else True
        mask &= (-distance <= window[1]) if window[1] >= 0 else True
        attended = F.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
        )
        outputs.append(attended.transpose(0, 1))
    expected = torch.cat(outputs)
    expected.backward(grad.float())
    differences = [
        float((a.grad.cpu().float() - b.grad).norm() / b.grad.norm()) for a, b in zip(on_cuda, plain, strict=True)
    ]
    return float((output.detach().cpu().float() - expected).norm() / expected.norm()), max(differences)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (2, 2)])
def test_the_reference_of_packed_attention(cuda_ranks, window):
    ((output, gradients),) = cuda_ranks(1, attention_gradients, window)
    assert output < 5e-3
    assert gradients < 1e-2


def refused(world: World) -> list[str]:
    """What the kernel for packed texts says to arguments that it cannot compute."""
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device="cuda")
    right = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(5, 2, 8, **right)
    messages = []
    for parts, cu, longest in (
        ([q.float()] * 3, starts, 3),
        ([torch.randn(5, 2, 12, **right)] * 3, starts, 3),
        ([torch.randn(5, 8, 2, **right).transpose(1, 2)] * 3, starts, 3),
        ([q] * 3, starts.long(), 3),
        ([q] * 3, starts, 2),
        ([q] * 3, starts[:2], 3),
        ([q] * 3, starts.cpu(), 3),
    ):
        with pytest.raises(RuntimeError, match="varlen_attn") as error:
            varlen_attn(*parts, cu, cu, longest, longest)
        messages.append(str(error.value))
    return messages


def test_the_kernel_of_packed_attention_checks_its_arguments(cuda_ranks):
    (messages,) = cuda_ranks(1, refused)
    for message, text in zip(
        messages,
        ("float32", "size 12", "strides", "int64", "3 tokens, but max 2", "[0, 3]", "on the device"),
        strict=True,
    ):
        assert text in message
