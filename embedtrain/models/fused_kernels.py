"""Fused kernels of liger-kernel in the layers of a model: RMSNorm, rotary positions and gated MLPs.

They replace the forward methods of single modules: weights, their names and other models of the process stay as they
are.
"""

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from embedtrain.utils.formatting import install_command, one_line


class Kernels(NamedTuple):
    """Kernels, each for what are several operations of a block."""

    # RMSNorm over the last dimension, of activations, weight, epsilon, what is added to the weight, "llama" (the weight
    # multiplies values of the compute type) or "gemma" (of fp32), and whether it may overwrite the result's gradient.
    norm: Callable[[Tensor, Tensor, float, float, str, bool], Tensor]
    silu: Callable[[Tensor, Tensor], Tensor]  # silu(gate) * up, SwiGLU; the backward pass overwrites both
    gelu: Callable[[Tensor, Tensor], Tensor]  # the same with the tanh approximation of GELU
    # Rotary positions of queries and keys [1, heads, L, D], which it overwrites, by cosines and sines [1, L, D].
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def liger_kernels() -> Kernels:
    """Those of liger-kernel (Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024)."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return Kernels(
        norm=LigerRMSNormFunction.apply,
        silu=LigerSiLUMulFunction.apply,
        gelu=LigerGELUMulFunction.apply,
        rotate=LigerRopeFunction.apply,
    )


# The families of transformers whose modules the kernels fit, checked on transformers 5.23: what is added to the weight
# of a norm, and in which type it multiplies.
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (0.0, "llama")),
    **dict.fromkeys(("gemma", "gemma3"), (1.0, "gemma")),
}
_MODELING = re.compile(r"transformers\.models\.(\w+)\.modeling_\1")
_ROTATE = "apply_rotary_pos_emb"  # their function of rotary positions, which an attention calls by this name
_GATES = {type(ACT2FN["silu"]): "silu", nn.SiLU: "silu", type(ACT2FN["gelu_pytorch_tanh"]): "gelu"}
# Of the norm of results and of gradients. In bf16 the kernels round less often than the modules.
_KERNEL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def fuse(blocks: Iterable[nn.Module], kernels: Kernels) -> None:
    """Let the norms, rotary positions and MLPs of these blocks compute with fused kernels, where they fit, in place."""
    for part, make in _fusible(blocks):
        if not isinstance(make, str):
            part.forward = make(part, kernels)


def fused_classes(blocks: Iterable[nn.Module]) -> tuple[list[str], list[str]]:
    """The classes whose modules `fuse` replaces, and those that it leaves as they are, each with the reason."""
    found = {type(part).__name__: make for part, make in _fusible(blocks)}
    left = [f"{name} {reason}" for name, reason in found.items() if isinstance(reason, str)]
    return [name for name, make in found.items() if not isinstance(make, str)], left


def kernel_error(blocks: Iterable[nn.Module], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these blocks cannot compute with liger-kernel on this device; None if they can.

    Each kernel is compared with the code that it replaces, forward and backward: what Triton cannot compile here, or a
    changed version of a library, should not show in the middle of a training.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed: {install_command('liger')}"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":  # with which Triton needs no GPU
        return f"liger-kernel needs a CUDA device, and this is {device.type}"
    compared = set[tuple[type, int]]()
    try:
        kernels = liger_kernels()
        for part, make in _fusible(blocks):
            if isinstance(make, str) or (kind := (type(part), _width(part))) in compared:
                continue
            compared.add(kind)
            if not _agrees(part, kernels, dtype, device):
                return f"the numbers of liger-kernel are not those of {kind[0].__name__}"
    except Exception as error:  # of compilers, drivers, and libraries of other versions
        return f"liger-kernel fails with {type(error).__name__}: {one_line(error)}"
    return None


_Make = Callable[[Any, Kernels], Callable[..., Any]]


def _fusible(blocks: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, _Make | str]]:
    """The modules that kernels are made for, with what makes their new method, or the reason why they do not fit."""
    for part in (part for block in blocks for part in block.modules()):
        name = type(part).__name__
        if _family(part) is None:
            continue
        if name.endswith("RMSNorm"):
            yield part, _norm_method
        elif name.endswith("MLP"):
            activation = type(part.act_fn)
            yield part, _mlp_method if activation in _GATES else f"has no kernel for {activation.__name__}"
        elif name.endswith("Attention"):
            names = type(part).forward.__code__.co_names
            yield part, _attention_method if _ROTATE in names else f"does not call {_ROTATE}"


def _family(part: nn.Module) -> str | None:
    """Not of a class of a user, even if it inherits from one of these families."""
    found = _MODELING.fullmatch(type(part).__module__)
    return found[1] if found is not None and found[1] in _FAMILIES else None


def _norm_method(norm: Any, kernels: Kernels) -> Callable[..., Any]:
    added, casting = _FAMILIES[str(_family(norm))]
    eps = _epsilon(norm)
    # Only products and rotary positions read these norms, and compute a new gradient. A norm of Gemma 3 is also read by
    # a sum, which gives its gradient to both of its terms.
    overwrites = casting == "llama"

    def forward(self: Any, hidden: Tensor) -> Tensor:
        # The kernel copies what is not contiguous: heads [N, heads, L, D] that are stored as [N, L, heads, D].
        is_swapped = hidden.dim() == 4 and not hidden.is_contiguous()
        rows = hidden.transpose(1, 2) if is_swapped else hidden
        normed = kernels.norm(rows, self.weight, eps, added, casting, overwrites)
        return normed.transpose(1, 2) if is_swapped else normed

    return MethodType(forward, norm)


def _mlp_method(mlp: Any, kernels: Kernels) -> Callable[..., Any]:
    multiply = getattr(kernels, _GATES[type(mlp.act_fn)])

    def forward(self: Any, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(multiply(self.gate_proj(hidden), self.up_proj(hidden)))
        return output

    return MethodType(forward, mlp)


def _attention_method(attention: Any, kernels: Kernels) -> Callable[..., Any]:
    """The class's own method with another function of rotary positions."""
    own = type(attention).forward
    names = own.__globals__ | {_ROTATE: partial(_rotate, own.__globals__[_ROTATE], kernels, _keeps_products(attention))}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return MethodType(forward, attention)


def _keeps_products(attention: nn.Module) -> bool:
    """Whether queries and keys are results of products, which selective recomputation keeps for the backward pass."""
    return not hasattr(attention, "q_norm")


def _rotate(
    reference: Callable[..., tuple[Tensor, Tensor]],
    kernels: Kernels,
    copies: bool,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Queries and keys [N, heads, L, D] with rotary positions; `copies`: their memory has to stay as it is."""
    texts, _, length, size = q.shape
    if unsqueeze_dim != 1 or cos.dtype != q.dtype or cos.shape[-1] != size:
        return reference(q, k, cos, sin, unsqueeze_dim)

    # Triton compiles a kernel for each number of texts; all chunks are one text here.
    def one_text(heads: Tensor) -> Tensor:
        heads = heads.clone() if copies else heads
        return heads.transpose(1, 2).reshape(1, texts * length, -1, size).transpose(1, 2)

    def of_texts(heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).reshape(texts, length, -1, size).transpose(1, 2)

    angles = (angle.expand(texts, -1, -1).reshape(1, texts * length, size) for angle in (cos, sin))
    rotated_q, rotated_k = kernels.rotate(one_text(q), one_text(k), *angles)
    return of_texts(rotated_q), of_texts(rotated_k)


def _width(part: Any) -> int:
    """The last dimension of what a kernel computes."""
    if hasattr(part, "weight"):
        return int(part.weight.shape[0])
    return int(part.head_dim if hasattr(part, "head_dim") else part.intermediate_size)


def _agrees(part: Any, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether results and gradients of a kernel are those of the module's own code, for two short texts."""
    width, own = _width(part), type(part).forward

    if hasattr(part, "weight"):
        shapes: list[tuple[int, ...]] = [(2, 5, width), (width,)]

        def results(first: Tensor, second: Tensor, *, fused: bool) -> Any:
            norm: Any = type(part)(1, eps=_epsilon(part))
            del norm.weight
            norm.weight = second
            return _norm_method(norm, kernels)(first) if fused else own(norm, first)

    elif hasattr(part, "act_fn"):
        shapes = [(2, 5, width)] * 2

        def results(first: Tensor, second: Tensor, *, fused: bool) -> Any:
            mlp = SimpleNamespace(act_fn=part.act_fn, down_proj=lambda product: product)
            mlp.gate_proj, mlp.up_proj = (lambda _: first), (lambda _: second)
            return _mlp_method(mlp, kernels)(first) if fused else own(mlp, first)

    else:
        shapes = [(2, 5, 4, width), (2, 5, 2, width)]
        angles = _waves((2, 5, width // 2), dtype, device).repeat(1, 1, 2)
        reference = own.__globals__[_ROTATE]
        rotate = partial(_rotate, reference, kernels, _keeps_products(part))

        def results(first: Tensor, second: Tensor, *, fused: bool) -> Any:
            heads = first.transpose(1, 2), second.transpose(1, 2)
            return (rotate if fused else reference)(*heads, angles.cos(), angles.sin())

    given = [_waves(shape, dtype, device).requires_grad_() for shape in shapes]

    def computed(*, fused: bool) -> list[Tensor]:
        with torch.enable_grad():
            result = results(*(tensor.clone() for tensor in given), fused=fused)
            outputs = result if isinstance(result, tuple) else (result,)
            grads = [_waves(output.shape, dtype, device, 0.3) for output in outputs]
            values = [output.detach().clone() for output in outputs]
            return [*values, *(grad.detach() for grad in torch.autograd.grad(outputs, given, grads))]

    pairs = zip(computed(fused=True), computed(fused=False), strict=True)
    return all(float((a - b).norm()) <= _KERNEL_TOLERANCE[dtype] * float(b.norm()) for a, b in pairs)


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _waves(shape: Sequence[int], dtype: torch.dtype, device: torch.device, step: float = 0.7) -> Tensor:
    """Numbers between -1 and 1 that use no random state, which a training continues with."""
    angles = torch.arange(math.prod(shape), device=device, dtype=torch.float32) * step
    return angles.sin().reshape(tuple(shape)).to(dtype)
