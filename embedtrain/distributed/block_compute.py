"""What the blocks of an encoder compute: recomputed activations, products in fp8, and compiled forward passes.

All of it replaces the forward methods of blocks or the classes of their layers, in place, and knows nothing of shards:
`sharding.shard_encoder` recomputes activations before it shards, and `sharding.compile_blocks` compiles after it.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # private names, checked on torch 2.13
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from embedtrain.config.recipe import SELECTIVE, ParallelConfig, Precision
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.utils.formatting import format_count, one_line

# Blocks whose activations are all recomputed.
_RECOMPUTED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# Blocks that are compiled; not by encoder, for the reason of `sharding._BLOCKS`.
_COMPILED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# Classes of blocks that run eagerly although they were to be compiled, and why, by encoder.
_EAGER: "weakref.WeakKeyDictionary[nn.Module, dict[str, str]]" = weakref.WeakKeyDictionary()
# What is done with such blocks, by encoder.
_FALLBACKS: "weakref.WeakKeyDictionary[nn.Module, Fallback]" = weakref.WeakKeyDictionary()
# A collective that changes blocks which cannot be compiled, and returns lines for the user.
Fallback = Callable[[Sequence[nn.Module]], list[str]]
# Graphs of one class of blocks. Each kind of its layers (three in ModernBERT) has one for passes with gradients, one
# without, and one for evaluation, and for padded texts again as many with and without a mask. Torch's limit is 8.
_MAX_GRAPHS = 64


def recompute_activations(blocks: Iterable[nn.Module], which: bool | str) -> None:
    """Keep the inputs of blocks, and recompute their activations in the backward pass.

    `SELECTIVE` also keeps the results of products of a weight and of attention, so that only operations between them
    are computed twice: little arithmetic, but most of what autograd saves.

    The switch of transformers is not used: some models have none (MPNet, and many with custom code), and it has no
    effect in evaluation mode.
    """
    for block in blocks:
        block.forward = _recomputed(block.forward, selective=which == SELECTIVE)
        if which is True:
            _RECOMPUTED.add(block)


def _recomputed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    context: dict[str, Any] = {"context_fn": _keep_products} if selective else {}

    # Around `forward` and not around the call, whose FSDP hooks would gather the weights once more.
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return checkpointed


# Operations whose results selective recomputation keeps: products with a weight, and kernels of attention, of torch
# (scaled_dot_product_attention on any device, varlen_attn) and of others. A product of two activations (bmm) is not
# among them: an attention that computes its matrix would keep it, which grows with the square of the length.
_KEPT = re.compile(r"aten::(addmm|mm|_scaled_mm|_grouped_mm)|\w+::(?!\w*backward)\w*att(entio)?n\w*")


@functools.cache
def _is_named(operation: str) -> bool:
    return _KEPT.fullmatch(operation.partition(".")[0]) is not None


def _draws_numbers(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if any("dropout" in name for name in names):
        return any(value > 0 for name, value in given.items() if "dropout" in name)
    return torch.Tag.nondeterministic_seeded in operation.tags


def _policy(_: object, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # An attention with dropout is computed again: without its draws those after it would be others in the backward
    # pass. (On GPUs its kernel draws them; on CPUs dropout is an operation of its own.)
    keep = _is_named(operation.name()) and not _draws_numbers(operation, args, kwargs)
    # A linear layer without bias is a product and a view of it that counts its changes separately. If it is kept too,
    # which takes no memory, torch notices a layer that changes the result in place. A product of activations has three
    # dimensions.
    keep |= operation is torch.ops.aten._unsafe_view.default and args[0].dim() == 2
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


_keep_products = functools.partial(create_selective_checkpoint_contexts, _policy)


def changes_kept_results(error: object) -> bool:
    """Whether this is torch's error about a block that changes in place what selective recomputation has kept."""
    return isinstance(error, RuntimeError) and "during selective activation checkpoint has been mutated" in str(error)


def not_selective(model: str) -> ModelError:
    """What is raised instead; `model` is its class."""
    return ModelError(
        f"parallel.activation_checkpointing={SELECTIVE} is impossible with {model}, whose layers change the "
        "result of a product in place: set it to true, which recomputes all of a layer, or to false"
    )


@contextlib.contextmanager
def explain_changed_results(tower: nn.Module) -> Iterator[None]:
    """Convert torch's error in a backward pass of this part of an encoder into `not_selective`.

    Planning finds such blocks before, unless the code of the model does not run on the meta device.
    """
    try:
        yield
    except RuntimeError as error:
        if changes_kept_results(error):
            raise not_selective(type(tower.backbone).__name__.removeprefix("FSDP")) from error
        raise


# Compute capability of the first GPUs whose products take fp8, and a divisor of the sizes of matrices that they take.
_FP8_CAPABILITY, _FP8_MULTIPLE = (8, 9), 16
_FP8_MIN_WEIGHTS = 10**9  # of a model; rounding the operands of smaller products takes as long as it saves


def use_fp8(encoder: nn.Module, blocks: Sequence[nn.Module], *, emulate: bool = False) -> str:
    """Make the trained linear layers of the blocks of an encoder compute in fp8 in training, in place; a line about it.

    torchao's recipe `rowwise_with_gw_hp`: outputs and gradients of inputs are products of fp8, with a scale for each
    text token and each row of the weight, so that what a token gets does not depend on the other tokens of its chunk,
    nor on the ranks. Gradients of weights are products of bf16. Weights, their names and evaluation stay as they are.

    Args:
        emulate: round to fp8, and multiply in fp32, which any device can.

    Raises ConfigError if no layer can compute in fp8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulate)
    num_converted, others = 0, set[str]()
    for block in blocks:
        reasons = {name: _not_in_fp8(name, part) for name, part in block.named_modules() if isinstance(part, nn.Linear)}
        converted = [name for name, reason in reasons.items() if reason is None]
        others |= {f"{name} ({reason})" for name, reason in reasons.items() if reason is not None}
        num_converted += len(converted)
        convert_to_float8_training(
            block, module_filter_fn=lambda _, name, names=frozenset(converted): name in names, config=config
        )
        for name in converted:
            layer: Any = block.get_submodule(name)
            layer.__class__ = _fp8_in_training(layer.__class__)
    listed = ", ".join(sorted(others))
    if not num_converted:
        raise ConfigError(
            "parallel.fp8=true: the blocks of the model have no trained linear layer that can compute in fp8"
            f"{f' ({listed})' * bool(listed)}; leave it out"
        )
    in_bf16 = "gradients of weights, attention, embeddings, heads and evaluation" + f", {listed}" * bool(listed)
    line = f"parallel.fp8: {num_converted} linear layers of blocks compute in fp8; in bf16: {in_bf16}"
    weights = sum(parameter.numel() for parameter in encoder.parameters())
    if weights >= _FP8_MIN_WEIGHTS:
        return line
    return f"{line}; a model of {format_count(weights, 'weight')}, below a billion, is not expected to become faster"


def _not_in_fp8(name: str, layer: nn.Linear) -> str | None:
    """Why a linear layer of a block does not compute in fp8."""
    if "lora_" in name or not layer.weight.requires_grad:
        return "adapter" if "lora_" in name or name.endswith(".base_layer") else "not trained"
    if type(layer) is not nn.Linear:
        return type(layer).__name__
    if layer.in_features % _FP8_MULTIPLE or layer.out_features % _FP8_MULTIPLE:
        return f"{layer.in_features} x {layer.out_features}, not multiples of {_FP8_MULTIPLE}"
    return None


@functools.cache
def _fp8_in_training(kind: Any) -> Any:
    """A subclass of torchao's layer that computes as a linear layer in evaluation, as the exported model does."""

    class Fp8Linear(kind):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                output: Tensor = kind.forward(self, input)
                return output
            return nn.functional.linear(input, self.weight, self.bias)

    return Fp8Linear


def require_fp8(world: World, precision: Precision) -> None:
    """Raise a ConfigError if a rank cannot compute in fp8. A collective; `precision` is that of all ranks."""
    device = world.device
    own = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    capability = min(map(tuple, world.gather(own)))
    if capability < _FP8_CAPABILITY:
        found = "one of {}.{}".format(*capability) if device.type == "cuda" else "a CPU"
        raise ConfigError(
            "parallel.fp8=true: needs GPUs of compute capability {}.{} or above (L4, RTX 4090, H100), and this is "
            "{}; leave it out".format(*_FP8_CAPABILITY, found)
        )
    if precision is not Precision.bf16:
        raise ConfigError(
            f"parallel.fp8=true: rounds products of bf16, and this run has {precision.value}; leave it out"
        )


def compiles_blocks(parallel: ParallelConfig, device: torch.device) -> bool:
    """Whether `parallel.compile` asks for compiled blocks in training on this device.

    By default on GPUs where Triton, which computes the graphs, is installed.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    return wants_compiled_blocks(parallel, gpu=device.type == "cuda" and has_triton)


def wants_compiled_blocks(parallel: ParallelConfig, *, gpu: bool) -> bool:
    """`compiles_blocks` of a machine that is not here; `gpu`: whether it has GPUs, with Triton.

    Kernels are chosen by their speed, so by default not where the same run has to repeat bit for bit.
    """
    if isinstance(parallel.compile, bool):
        return parallel.compile
    return gpu and not parallel.deterministic


def compile_forward(encoder: nn.Module, blocks: Sequence[nn.Module], fallback: Fallback) -> None:
    """Compile the forward pass of each of these blocks of an encoder in place, as a whole and for all lengths.

    Compilation happens in the passes that first need a graph. A block that cannot be compiled runs eagerly, as do all
    of its class; `EagerBlocks` says why, and calls `fallback` with them.
    """
    _FALLBACKS[encoder] = fallback
    _COMPILED.update(blocks)
    failed = _EAGER.setdefault(encoder, {})
    # Both settings belong to the process, and apply when a graph is compiled. Without the second one a graph whose
    # backward pass cannot be compiled fails there, when it is too late to run the block eagerly.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    torch._functorch.config.force_non_lazy_backward_lowering = True
    for block in blocks:
        # Not its call, as in `_recomputed`. The hooks of FSDP and of early exits stay outside of the graph.
        name, recomputed = _class_name(block), block in _RECOMPUTED
        forward = vars(block.forward)["__wrapped__"] if recomputed else block.forward
        block.forward = _compiled(forward, name, failed, recomputed=recomputed)


def _class_name(block: nn.Module) -> str:
    return type(block).__name__.removeprefix("FSDP")


def _compiled(
    forward: Callable[..., Any], name: str, failed: dict[str, str], *, recomputed: bool
) -> Callable[..., Any]:
    """`forward`, compiled until a block of this name fails, which is recorded."""
    compiled = torch.compile(forward, fullgraph=True, dynamic=True)
    if recomputed:
        # Around the graph: one that recomputes all of a padded attention with dropout draws other masks than the graph
        # of the pass without gradients.
        compiled, forward = _recomputed(compiled, selective=False), _recomputed(forward, selective=False)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in failed:
            try:
                return compiled(*args, **kwargs)
            # Raised before anything is computed: of the code of the block, of the compiler, or of too many graphs.
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                failed[name] = one_line(error)
        return forward(*args, **kwargs)

    return call


class EagerBlocks:
    """The blocks of several encoders that run eagerly because they could not be compiled; each is named once."""

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        self._encoders, self._named = list(encoders), set[str]()

    @property
    def notice(self) -> Notice:
        """What this rank announces at the end of a step."""
        return Notice.not_compiled if self._unnamed() else Notice(0)

    def name(self, world: World) -> list[str]:
        """A sentence about each class of blocks that failed on any rank and has no sentence yet. A collective.

        All ranks run the blocks of these classes eagerly from now on; their fallbacks add sentences.
        """
        of_ranks = world.gather(self._unnamed())
        reasons = {name: reason for of_rank in reversed(of_ranks) for name, reason in of_rank.items()}
        self._named |= reasons.keys()
        notes = list[str]()
        for encoder in self._encoders:
            _EAGER.get(encoder, {}).update(reasons)
            blocks = [part for part in encoder.modules() if part in _COMPILED and _class_name(part) in reasons]
            if blocks and encoder in _FALLBACKS:
                notes += _FALLBACKS[encoder](blocks)
        sentences = [
            f"parallel.compile: {name} cannot be compiled and runs eagerly, which is slower: {reason}"
            for name, reason in reasons.items()
        ]
        return sentences + list(dict.fromkeys(notes))

    def _unnamed(self) -> dict[str, str]:
        failed = (item for encoder in self._encoders for item in _EAGER.get(encoder, {}).items())
        return {name: reason for name, reason in failed if name not in self._named}


def num_graphs() -> int:
    """How many graphs this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
