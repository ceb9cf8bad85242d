"""Bytes that a training step reads and writes, and kernels that it launches: counted on tensors without memory.

Nothing is computed and no device is needed. A step encodes packed texts of 512 tokens with weights in bf16, forward and
backward, and updates the weights. Without compilation every operation of torch that computes is a kernel, which reads
its arguments and writes its results once. For compiled blocks TorchInductor's scheduler decides which operations are
one kernel, and counts what that reads and writes. The kernel of packed attention is opaque to both.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import detect_fake_mode  # private names, checked on torch 2.13
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AttentionInterface, PretrainedConfig

from benchmarks.gpu.models import sized_named
from benchmarks.measure import markdown
from embedtrain.config.recipe import SELECTIVE
from embedtrain.data.types import Chunk, Packing
from embedtrain.distributed.block_compute import recompute_activations
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.planning.model_costs import LiveBytes

TITLE = "Bytes moved and kernels launched in a training step, computed without a device"
MODELS = ("XLM-R-large", "Qwen3-0.6B")
TEXTS, LENGTH = 32, 512
DROPOUT = 0.1  # of the configurations of models that have any
# Of an H100 SXM by its datasheet: FLOP/s of dense products in bf16, and bytes/s of its memory.
PEAK, BANDWIDTH = 989.4e12, 3.35e12
_HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on
_NAME = "embedtrain_varlen_shapes"
_aten = torch.ops.aten
# These allocate, or return their argument.
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.detach, _aten._unsafe_view}
# These read as much of their first argument, a table, as they write.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}


@dataclass(frozen=True)
class Counts:
    """What a computation costs; sums and multiples are those of all fields."""

    launches: float = 0
    read: float = 0  # bytes
    written: float = 0  # bytes
    between: float = 0  # bytes of these that are moved by other kernels than products and attention
    flops: float = 0
    kept: float = 0  # bytes between the forward and the backward pass

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self._fields, other._fields, strict=True)))

    def __mul__(self, factor: float) -> "Counts":
        return Counts(*(factor * value for value in self._fields))

    @property
    def _fields(self) -> tuple[float, ...]:
        return self.launches, self.read, self.written, self.between, self.flops, self.kept

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def seconds(self) -> float:
        """The least that PEAK and BANDWIDTH allow: products and attention, and what is between them."""
        return max(self.flops / PEAK, (self.moved - self.between) / BANDWIDTH) + self.between / BANDWIDTH


class KernelCounter(TorchDispatchMode):
    """Counts operations that compute, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if not func.is_view and packet not in _FREE and func.namespace != "prim":
            results = _tensors(result)
            written = sum(map(_bytes, results.values()))
            arguments = _tensors((args, kwargs))
            read = sum(map(_bytes, arguments.values()))
            if packet in _LOOKUPS:
                read += written - _bytes(args[0])
            between = 0 if packet in flop_registry else read + written
            self.counts += Counts(launches=1, read=read, written=written, between=between)
        return result


def _tensors(values: Any) -> dict[int, Tensor]:
    return {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def _bytes(tensor: Tensor) -> int:
    """Bytes of the elements that differ: an expanded dimension is read once."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return number * tensor.element_size()


def counted(call: Callable[[], object]) -> Counts:
    """The counts of a call, without `kept`."""
    with KernelCounter() as kernels:
        call()
    with FlopCounterMode(display=False) as products:  # which also divides some operations into others
        call()
    return replace(kernels.counts, flops=products.get_total_flops())


def measure(_: str = "", *, small: bool = False) -> str:
    """The table; `small`: tiny models."""
    rows = [row for name in MODELS for row in _rows(name, small=small)]
    header = ["model", "blocks", "kernels", "GB read", "GB written", "TFLOP", "KiB kept a token",
              "ms at least", "of them between products", "share of the peak at most"]  # fmt: skip
    return markdown(header, rows)


def _rows(name: str, *, small: bool) -> Iterator[list[str]]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = Step(name, small=small)
        eager, update = step.encoder_counts(), step.update_counts()
        of_block = step.block_counts()
        rest = eager + of_block * -step.num_blocks
        variants = {
            "eager": of_block,
            "selective recomputation": step.block_counts(SELECTIVE),
            "recomputation": step.block_counts(True),
            "compiled": step.compiled_counts(),
        }
    for variant, counts in variants.items():
        whole = rest + counts * step.num_blocks
        kept = step.rest_kept + counts.kept * step.num_blocks
        yield [
            name, variant, f"{whole.launches:,.0f}", f"{whole.read / 1e9:,.1f}", f"{whole.written / 1e9:,.1f}",
            f"{whole.flops / 1e12:,.1f}", f"{kept / step.tokens / 1024:,.0f}", f"{1e3 * whole.seconds:.0f}",
            f"{1e3 * whole.between / BANDWIDTH:.0f}", f"{eager.flops / PEAK / whole.seconds:.0%}",
        ]  # fmt: skip
    yield [
        name, "the update of the weights", f"{update.launches:,.0f}", f"{update.read / 1e9:,.1f}",
        f"{update.written / 1e9:,.1f}", "0", "-", f"{1e3 * update.seconds:.0f}", f"{1e3 * update.seconds:.0f}", "-",
    ]  # fmt: skip


class Step:
    """A model without memory, and the inputs of its first block."""

    def __init__(self, name: str, *, small: bool) -> None:
        sized = sized_named(name, small=small)
        config = {name: DROPOUT if name == "hidden_dropout_prob" else value for name, value in sized.config.items()}
        source = open_model_source(DenseOptions(config=config, pooling=sized.pooling))
        self.encoder: Encoder = build_encoder(source)
        _fill(self.encoder, torch.bfloat16)
        for part in self.encoder.modules():
            if isinstance(getattr(part, "config", None), PretrainedConfig):
                part.config._attn_implementation = _NAME
            if isinstance(part, nn.Dropout) and part.p:
                part.forward = partial(_fused_dropout, part.p)  # type: ignore[method-assign]
        self.blocks = find_blocks(self.encoder)
        self.num_blocks = len(self.blocks)
        texts = 2 if small else TEXTS
        self.tokens = texts * LENGTH
        starts = torch.empty(texts + 1, dtype=torch.int32)
        positions = torch.empty(1, self.tokens, dtype=torch.int64)
        ids = torch.empty(1, self.tokens, dtype=torch.int64)
        self.chunk = Chunk(
            ids, torch.empty_like(ids), packing=Packing((LENGTH,) * texts, starts, positions), has_padding=False
        )
        self.encoder.train()
        self.rest_kept = 0.0
        self._hidden, self._arguments, self._options = self._inputs()

    def _inputs(self) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        found: list[Any] = []
        hook = self.blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: found.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            self.encoder(self.chunk)
        hook.remove()
        (args, kwargs), *_ = found
        return args[0], args[1:], kwargs

    def encoder_counts(self) -> Counts:
        """Forward and backward pass of all texts."""
        existing = [self.chunk.ids, *self.encoder.parameters(), *self.encoder.buffers()]
        with LiveBytes(existing) as live:
            (vectors,) = self.encoder(self.chunk)
            kept = float(live.bytes)
        del vectors

        def step() -> None:
            (vectors,) = self.encoder(self.chunk)
            vectors.backward(torch.empty_like(vectors))

        counts = counted(step)
        self._drop_gradients()
        self.rest_kept = kept - self.num_blocks * self.block_counts().kept
        return replace(counts, kept=kept)

    def block_counts(self, recomputed: bool | str = False) -> Counts:
        """Forward and backward pass of a block; which activations it computes again is as in the recipe."""
        block = self.blocks[0]
        forward = block.forward
        if recomputed:
            recompute_activations([block], recomputed)
        try:
            hidden = self._hidden.detach().requires_grad_()
            existing = [*tree_leaves((hidden, self._arguments, self._options)), *block.parameters()]
            with LiveBytes([leaf for leaf in existing if isinstance(leaf, Tensor)]) as live:
                output = self._call(block, hidden)
                kept = live.bytes
            del output
            counts = counted(lambda: self._both_passes(hidden))
        finally:
            block.forward = forward  # type: ignore[method-assign]
        self._drop_gradients()
        return replace(counts, kept=kept)

    def _call(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        output = block(hidden, *self._arguments, **self._options)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _both_passes(self, hidden: Tensor) -> None:
        output = self._call(self.blocks[0], hidden)
        output.backward(torch.empty_like(output))

    def compiled_counts(self) -> Counts:
        """The same of a compiled block, whose activations TorchInductor keeps or computes again as it decides."""
        block, lowered = self.blocks[0], list[Counts]()
        names, weights = zip(*block.named_parameters(), strict=True)
        leaves, structure = tree_flatten((self._arguments, self._options))
        # All tensors are inputs of the graph, also the one in the packing.
        inputs = [leaf.starts if isinstance(leaf, Packing) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(inputs) if isinstance(leaf, Tensor)]

        def forward(hidden: Tensor, *values: Tensor) -> Tensor:
            changed = list(leaves)
            for place, value in zip(places, values, strict=False):
                leaf = leaves[place]
                changed[place] = Packing(leaf.lengths, value, value) if isinstance(leaf, Packing) else value
            arguments, options = tree_unflatten(changed, structure)
            parameters = dict(zip(names, values[len(places) :], strict=True))
            output = torch.func.functional_call(block, parameters, (hidden, *arguments), options)
            result: Tensor = output[0] if isinstance(output, tuple) else output
            return result

        def compiler(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
            lowered.append(_scheduled(module, inputs))
            return make_boxed_func(module.forward)

        compiled = aot_function(
            forward,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=_partition,
            decompositions=select_decomp_table(),
        )
        hidden = self._hidden.detach().requires_grad_()
        values = [hidden, *(inputs[place] for place in places), *weights]
        compiled(*values).sum().backward()  # compiles both
        with LiveBytes(values) as live:
            output = compiled(*values)
            kept = live.bytes
        with FlopCounterMode(display=False) as products:
            output = compiled(*values)
            output.backward(torch.empty_like(output))
        self._drop_gradients()
        forward_pass, backward_pass = lowered
        return replace(forward_pass + backward_pass, flops=products.get_total_flops(), kept=kept)

    def update_counts(self) -> Counts:
        """Weights in fp32 become bf16, gradients fp32; clipping, and AdamW."""
        weights = [torch.empty_like(p, dtype=torch.float32) for p in self.encoder.parameters()]
        gradients = [torch.empty_like(p) for p in self.encoder.parameters()]

        def update() -> None:
            for weight in weights:
                weight.to(torch.bfloat16)
            found = [gradient.float() for gradient in gradients]
            total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found)))
            torch._foreach_mul_(found, total)
            moments = [[torch.empty_like(weight) for weight in weights] for _ in range(2)]
            steps = [torch.empty(()) for _ in weights]
            torch._fused_adamw_(
                weights, found, *moments, [], steps, lr=1e-5, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip

        return counted(update)

    def _drop_gradients(self) -> None:
        self.encoder.zero_grad(set_to_none=True)


def _partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Divide a graph into forward and backward pass, as torch.compile does."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, inputs, **options)


def _fill(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace weights and buffers by tensors of the CPU, which have no memory either in a FakeTensorMode."""
    weights: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight not in weights:
                weights[weight] = nn.Parameter(torch.empty_like(weight, device="cpu", dtype=dtype))
            setattr(part, name, weights[weight])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty_like(buffer, device="cpu"))


def _scheduled(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Counts:
    """What TorchInductor makes of a graph, up to the code."""
    mode = detect_fake_mode(inputs)
    view_to_reshape(module)
    graph = GraphLowering(module, example_inputs=inputs)
    with (
        V.set_graph_handler(graph),
        V.set_fake_mode(mode),
        V.set_extern_kernel_nodes([]),
        V.set_debug_handler(DebugContext()),
    ):
        graph.run(*inputs)
        graph.init_wrapper_code()
        graph._update_scheduler()
        counts = Counts()
        for node in graph.scheduler.nodes:
            # A result of a kernel with several is no kernel.
            if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
                continue
            read, written = node.get_read_buffer_sizes(), node.get_write_buffer_sizes()
            between = 0 if isinstance(node, ExternKernelSchedulerNode) else read + written
            counts += Counts(launches=1, read=read, written=written, between=between)
    return counts


def _fused_dropout(p: float, hidden: Tensor) -> Tensor:
    """Dropout as a GPU computes it, with one byte of mask for an element."""
    return torch.native_dropout(hidden, p, True)[0]


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, packing: Packing,
    scaling: float | None = None, is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Packed attention by the kernel of GPUs, on any device."""
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    parts = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": True} if groups > 1 and _HAS_ENABLE_GQA else {}
    if groups > 1 and not grouped:
        parts[1:] = [part.repeat_interleave(groups, dim=1) for part in parts[1:]]
    output = varlen_attn(
        *parts, packing.starts, packing.starts, packing.longest, packing.longest, scale=scaling,
        window_size=(-1, 0 if causal else -1), **grouped,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.unsqueeze(0), None


AttentionInterface.register(_NAME, _varlen)
