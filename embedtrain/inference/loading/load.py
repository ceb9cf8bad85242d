"""Loads a model: from its options to a sharded encoder with weights and tokenizer, packed or padded, and verifies it.

Packed texts are compared with padded ones, and scores with those of transformers' own class.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from embedtrain.config.recipe import SELECTIVE, Attention, LoraConfig, ModelConfig, ParallelConfig, Precision, Strategy
from embedtrain.config.validation import model_option, tower_options_named
from embedtrain.data.tokens import TextTokenizer, TowerLayout
from embedtrain.data.types import Chunk
from embedtrain.distributed.block_compute import compiles_blocks, use_fp8
from embedtrain.distributed.device import free_memory, node_memory, total_memory
from embedtrain.distributed.sharding import (
    ParallelLayout,
    UnshardedWeight,
    broadcast_weights,
    compile_blocks,
    copy_local_rows,
    read_shards,
    require_finite_weights,
    reshard,
    resolve_precision,
    shard_encoder,
    warm_up,
)
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError, ModelError
from embedtrain.formats.export_record import verify_weights
from embedtrain.formats.peft import open_adapter
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import check_vocabulary, load_tokenizer, resolve_max_length
from embedtrain.models.adapters import (
    AdapterInfo,
    add_adapters,
    base_name,
    cast_projections,
    copy_base_values,
    describe_adapters,
    four_bit_layers,
    frozen_dtype,
    initial_adapters,
)
from embedtrain.models.attention import (
    FLASH_ATTENTION_3,
    choose_flash_attention,
    compute_capability,
    packing_limit,
)
from embedtrain.models.attention_direction import attends_to_later_tokens
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder, full_state_dict, head_weights, locate_weights
from embedtrain.models.encoder import Encoder, has_token_types
from embedtrain.models.fused_kernels import fuse, fused_classes, kernel_error, liger_kernels
from embedtrain.models.packing import (
    PackingCheck,
    check_packing,
    disable_packing,
    enable_packing,
    packing_mismatch,
    set_packed_kernel,
    window_mismatch,
)
from embedtrain.models.stored_weights import TensorLocation, stored_dtype
from embedtrain.models.types import ModelSource
from embedtrain.planning.memory import ClusterSpec, StepWorkload, fit_activation_tokens
from embedtrain.planning.model_costs import ModelSpec, model_spec
from embedtrain.planning.strategy import LayoutChoice, choose_encoding_layout, choose_layout

QUIET_LOGGERS = ("sentence_transformers", "datasets", "huggingface_hub", "torch.distributed", "torchao")

# The variable that accelerate and transformers read the layer class from.
BLOCK_CLASS_VARIABLE = "FSDP_TRANSFORMER_CLS_TO_WRAP"
# The workload of a recipe with default options.
DEFAULT_WORKLOAD = StepWorkload()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for training or encoding."""

    encoder: Encoder  # sharded in place
    source: ModelSource
    tokenizer: TextTokenizer  # with the maximal length
    layout: ParallelLayout
    notes: tuple[str, ...]  # lines for the user about what was detected and decided
    precision: str  # in which it computes: bf16 or fp32; of a graph, the name of its backend
    reduce_per_step: bool  # gradients are reduced once per step, which keeps full gradients on every rank
    activation_tokens: int = 0  # tokens of a step whose activations a rank keeps
    adapted: AdapterInfo | None = None  # the trained adapters; None if the model itself is trained
    planned_memory: float = 0.0  # bytes of a rank in a training step in which each chunk is encoded twice


def _limits_of_every_rank(world: World) -> tuple[ClusterSpec, int, tuple[int, int]]:
    """The ranks, free bytes and compute capability of a rank; each of those that have the least. A collective."""
    sizes = total_memory(world.device, world.local_size), free_memory(world.device, world.local_size), node_memory()
    total, free, host, capability = zip(*world.gather((*sizes, compute_capability(world.device))), strict=True)
    on_gpu = world.device.type == "cuda"
    ranks = ClusterSpec.of_ranks(world.size, world.local_size, min(total), gpu=on_gpu, host_memory=min(host))
    return ranks, min(free), min(capability)


def load_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    seed: int,
    source: ModelSource | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    read_weights: bool = True,
    work: StepWorkload | None = DEFAULT_WORKLOAD,
) -> LoadedModel:
    """Build on the meta device, shard, then read each rank's rows of the weights. Every rank must call.

    Errors are raised on every rank, if possible before any weight is read.

    Args:
        seed: random weights are a function of it.
        source: the result of `open_model_source(model)`, if the model is already open.
        tokenizer: trained on the data, for a model without one; its ids go into the configuration.
        read_weights: false if a checkpoint's weights follow: then only frozen weights are read, and the caller verifies
            and compiles the model.
        work: of a training step; None for a model that only encodes, which needs less memory and is not compiled.
    """
    quiet_libraries()
    parallel = replace(parallel, precision=resolve_precision(parallel.precision, world))
    machines, free, capability = _limits_of_every_rank(world)
    with world.fail_together("opening the model"):
        source = _open_verified(model, source, world, read_weights=read_weights or model.adapters.on)
        bound = _bound_tokenizer(source, tokenizer, model)
        encoder = build_encoder(source, None if work is None else model.dropout)
        blocks, notes = _blocks(encoder, parallel, required=parallel.strategy in (Strategy.fsdp, Strategy.hsdp))
        locations = locate_weights(source, {name: tensor.shape for name, tensor in encoder.state_dict().items()})
        packing = prepare_packing(encoder, model.attention, parallel, capability)
        packed = packing.padding_reason is None
        adapted = _add_adapters(encoder, model.adapters, parallel, source)
        if parallel.fp8 and work is not None:
            notes.append(use_fp8(encoder, blocks, emulate=world.device.type == "cpu"))  # which training refuses
    compiles = work is not None and bool(blocks) and compiles_blocks(parallel, world.device)
    fused, kernel_notes = False, list[str]()
    if work is not None:
        fused, kernel_notes = _use_fused_kernels(blocks, parallel, world, compiles=compiles)
    with world.fail_together("planning the memory of the model"):
        costs = _model_spec(encoder, blocks, parallel, bound, world, packed=packed, fused=fused)
        if work is not None:
            work = replace(work, tokens_per_text=bound.longest_text, picture_cost=costs.weights.picture_cost)
        choice, activation_tokens = _choose_layout(parallel, machines, costs, work, free)
        layout = choice.layout
        if layout.strategy is not Strategy.ddp and not blocks:
            _blocks(encoder, parallel, required=True)
    notes += _describe(encoder, source, bound, costs, layout, blocks, adapted, compiles=compiles)
    shard_encoder(encoder, blocks, layout, parallel, world.device)
    if read_weights or adapted is not None:
        notes.append(_read_weights(encoder, source, locations, world, seed))
    if read_weights and adapted is not None:
        notes += _initialize_adapters(encoder, adapted, model, world, seed)
    elif adapted is not None:  # BOFT solves an equation, which fails for what happens to be in memory
        for name, parameter in encoder.named_parameters():
            if base_name(name) is None:
                parameter.detach().zero_()
    warm_up(encoder, Chunk.of_one_token(world.device))
    if read_weights:  # otherwise trained weights are uninitialized memory until the checkpoint is loaded
        _check_weights(encoder, model, source, world)
    if work is not None and not choice.reduce_per_step:
        notes.append(_describe_reduction_per_chunk(costs))
    notes += [*packing_notes(encoder, packing, model.attention, world, trains=work is not None), *kernel_notes]
    loaded = LoadedModel(
        encoder=encoder,
        source=replace(source, tokenization=replace(source.tokenization, max_length=bound.max_length)),
        tokenizer=bound.with_packing(packed),
        layout=layout,
        notes=tuple(notes),
        precision=parallel.precision.value,
        reduce_per_step=choice.reduce_per_step,
        activation_tokens=activation_tokens,
        adapted=adapted,
        planned_memory=0.0 if choice.best is None else choice.best.memory.total,
    )
    if not read_weights:
        return loaded
    finish = verify_packing if work is None else verify_and_compile
    return finish(loaded, model, parallel, world)


def verify_and_compile(
    loaded: LoadedModel,
    model: ModelConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    progress: Callable[[str], None] = lambda note: None,
) -> LoadedModel:
    """`verify_packing` of a model that is trained, or used in training, and compilation of its blocks. A collective."""
    loaded = verify_packing(loaded, model, parallel, world, progress=progress)
    if compiles_blocks(parallel, world.device):
        parallel = replace(parallel, precision=Precision(loaded.precision))
        compile_blocks(loaded.encoder, lambda blocks: _use_fused_kernels(blocks, parallel, world)[1])
    return loaded


def verify_packing(
    loaded: LoadedModel,
    model: ModelConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    progress: Callable[[str], None] = lambda note: None,
) -> LoadedModel:
    """Compare packed with padded vectors; the returned model pads texts if they differ. A collective.

    `progress` receives the note about padding, which is added to the model's notes as well. A ModelError if vectors
    differ and `model.attention=packed`.
    """
    tokenizer = loaded.tokenizer
    reason = verify_packed_vectors(loaded.encoder, model.attention, parallel, world) if tokenizer.packed else None
    if reason is None:
        return loaded
    note = f"texts are padded: {reason}"
    progress(note)
    return replace(loaded, tokenizer=tokenizer.with_packing(False), notes=(*loaded.notes, note))


def fit_config_to_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the vocabulary size and the special ids of the configuration to those of a tokenizer trained on the data."""
    config = source.config.get_text_config()
    config.vocab_size = len(tokenizer)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        if getattr(tokenizer, name, None) is not None:
            setattr(config, name, getattr(tokenizer, name))


def quiet_libraries() -> None:
    """Switch off progress bars and warnings of the libraries; errors are still shown."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _bound_tokenizer(source: ModelSource, trained: PreTrainedTokenizerBase | None, model: ModelConfig) -> TextTokenizer:
    """The model's tokenizer, or the one that was trained on the data."""
    if trained is None:
        return model_tokenizer(source, model.tokenizer, model.tokenizer_revision)
    fit_config_to_tokenizer(source, trained)
    return bound_tokenizer(source, trained)


def _add_adapters(
    encoder: Encoder, adapters: LoraConfig, parallel: ParallelConfig, source: ModelSource
) -> AdapterInfo | None:
    """Add the adapters that the recipe trains; None if it trains the model itself."""
    files = open_adapter(adapters)
    if not adapters.on:
        return None
    frozen = frozen_dtype(adapters.base_dtype, parallel.precision, stored_dtype(source))
    adapted = add_adapters(encoder, adapters, files, frozen)
    cast_projections(encoder, torch.bfloat16 if parallel.precision is Precision.bf16 else torch.float32)
    return adapted


def _choose_layout(
    parallel: ParallelConfig, machines: ClusterSpec, costs: ModelSpec, work: StepWorkload | None, free: int
) -> tuple[LayoutChoice, int]:
    """The layout of the model, and the tokens of a step whose activations a rank keeps in `free` bytes."""
    if work is None:
        return choose_encoding_layout(parallel, machines, costs), 0
    choice = choose_layout(parallel, machines, costs, work)
    tokens = fit_activation_tokens(
        costs, choice.layout, machines, work, reduce_per_step=choice.reduce_per_step, free=free
    )
    return choice, tokens


def _model_spec(
    encoder: Encoder,
    blocks: list[nn.Module],
    parallel: ParallelConfig,
    tokenizer: TextTokenizer,
    world: World,
    *,
    packed: bool,
    fused: bool,
) -> ModelSpec:
    return model_spec(
        encoder,
        blocks,
        precision=parallel.precision,
        tokens_per_text=tokenizer.longest_text,
        gpu=world.device.type == "cuda",
        packed=packed,
        fused=fused,
        vectors=tokenizer.vectors_per_text,
    )


def _use_fused_kernels(
    blocks: Sequence[nn.Module], parallel: ParallelConfig, world: World, *, compiles: bool = False
) -> tuple[bool, list[str]]:
    """Let blocks compute with fused kernels where the options ask for it. A collective.

    With `compiles` it only checks that they could, if `parallel.fused_kernels=true`. A ConfigError on every rank if one
    of them cannot.

    Returns:
        Whether they do, and lines for the user.
    """
    required, (fused, left) = parallel.fused_kernels is True, fused_classes(blocks)
    if parallel.fused_kernels is False or not (required or (world.device.type == "cuda" and not compiles)):
        return False, []
    if not fused:
        classes = " and ".join(dict.fromkeys(type(block).__name__.removeprefix("FSDP") for block in blocks))
        reasons = "; ".join(left) or "it has no modules of Llama, Mistral, Qwen2, Qwen3 or Gemma"
        note = f"no fused kernels in {classes or 'this model'}: {reasons}"
        return False, [note] if required or left else []
    dtype = torch.bfloat16 if parallel.precision is Precision.bf16 else torch.float32
    errors = world.gather(kernel_error(blocks, dtype, world.device))
    error = next((text for text in errors if text is not None), None)
    if error is not None and required:
        raise ConfigError(f"parallel.fused_kernels=true: {error}; or write parallel.fused_kernels=auto")
    if error is not None:
        return False, [f"no fused kernels (parallel.fused_kernels) in layers that are not compiled: {error}"]
    if compiles:
        return False, []
    fuse(blocks, liger_kernels())
    return True, ["; ".join([f"fused kernels of liger-kernel: {', '.join(fused)}", *left])]


def _blocks(encoder: Encoder, parallel: ParallelConfig, *, required: bool) -> tuple[list[nn.Module], list[str]]:
    """The blocks to shard, and a note if the environment names their class."""
    required &= encoder.has_layers
    from_environment = os.environ.get(BLOCK_CLASS_VARIABLE, "").strip(" ,")
    if parallel.block_class is None and from_environment:
        blocks = find_blocks(encoder, from_environment, option=f"{BLOCK_CLASS_VARIABLE} (in the environment)")
        return blocks, [f"layer class {from_environment}: read from {BLOCK_CLASS_VARIABLE} in the environment"]
    return find_blocks(encoder, parallel.block_class, required=required), []


def _open_verified(model: ModelConfig, source: ModelSource | None, world: World, *, read_weights: bool) -> ModelSource:
    """Compare the weights with their checksums, if they are read and an export has written them."""
    source = open_model_source(model) if source is None else source
    for part in (source, *source.towers.values()):
        if read_weights and part.directory is not None:
            # The ranks of each host share the files, because hosts may have disks of their own.
            verify_weights(part.directory, world.local_rank, world.local_size)
    return source


def _read_weights(
    encoder: Encoder, source: ModelSource, locations: dict[str, TensorLocation] | None, world: World, seed: int
) -> str:
    """Read all weights except those of adapters; a note about how."""
    tensors = {base: t for name, t in encoder.state_dict().items() if (base := base_name(name)) is not None}
    quantizers = {
        str(base_name(name)): UnshardedWeight(
            torch.Size((layer.out_features, layer.in_features)), layer.quantize_weight
        )
        for name, layer in four_bit_layers(encoder)
    }
    directories = " and ".join(str(part.directory) for part in source.parts.values() if part.directory is not None)
    if locations is not None:
        with world.fail_together("reading the model's weights"):
            heads = head_weights(source)
            stored = {name: tensor for name, tensor in tensors.items() if name not in heads}
            read_shards(stored, locations, quantizers, world.device)
            for name, weight in heads.items():
                copy_local_rows(tensors[name], weight)
        return f"weights: every rank read its own slices of {directories}"
    broadcast_weights(tensors, quantizers, world, lambda: full_state_dict(source, seed))
    if not directories:
        return f"weights: random from seed {seed}, created on rank 0 and distributed"
    new = f", the new {source.kind.new_part} from seed {seed}"
    return f"weights: read on rank 0 from {directories} by transformers and distributed{new * source.has_new_head}"


def _check_weights(encoder: Encoder, model: ModelConfig, source: ModelSource, world: World) -> None:
    """Reject weights that are not finite; measure the direction of attention, which some configurations do not set."""
    require_finite_weights(encoder, f"{model_option('path')}={model.path}", world)
    verify_outputs(encoder, source, world)
    bidirectional = model.bidirectional
    if bidirectional is None:
        return
    training = encoder.training
    measured = attends_to_later_tokens(encoder.eval(), (0, 1, 2), world.device)
    encoder.train(training)
    reshard(encoder)
    if measured is not bidirectional:
        behaviours = {
            True: "attend to later tokens",
            False: "do not attend to later tokens",
            None: "attend to later tokens either only with padding or only without",
        }
        raise ModelError(
            f"model.bidirectional={str(bidirectional).lower()}, but the tokens of {type(encoder.backbone).__name__} "
            f"{behaviours[measured]}: leave it out, or choose another model"
        )


def _initialize_adapters(
    encoder: Encoder, adapted: AdapterInfo, model: ModelConfig, world: World, seed: int
) -> list[str]:
    """Set the initial weights of adapters: every rank draws or reads all of them and keeps its rows."""
    with world.fail_together("reading the adapter"):
        state = encoder.state_dict()
        with torch.no_grad():
            for name, weight in initial_adapters(encoder, adapted, seed):
                copy_local_rows(state[name], weight)
            copy_base_values(state, adapted, lambda t: t.to_local() if isinstance(t, DTensor) else t)
    if adapted.files is None:
        return []
    base = model.path if model.path is not None else "model.config"
    base_model = adapted.files.base_model
    mismatch = f", trained on {base_model} and added to {base}" if base_model not in ("", base) else ""
    return [f"adapter: read from {adapted.files.directory}{mismatch}"]


def _describe(
    encoder: Encoder,
    source: ModelSource,
    tokenizer: TextTokenizer,
    costs: ModelSpec,
    layout: ParallelLayout,
    blocks: Sequence[nn.Module],
    adapted: AdapterInfo | None,
    *,
    compiles: bool,
) -> list[str]:
    """Lines about the model, its layout on the ranks, and its adapters."""
    memory = ", activations recomputed" * bool(layout.activation_checkpointing)
    memory += " between products" * (layout.activation_checkpointing == SELECTIVE)
    memory += ", in host memory" * layout.cpu_offload
    memory += ", compiled in the first steps" * compiles
    classes = [type(block).__name__ for block in blocks]
    backbones = [type(tower.backbone).__name__.removeprefix("FSDP") for tower in encoder.towers.values()]
    return [
        f"{' and '.join(backbones)}, {costs.weights.parameters:,} parameters, "
        f"{source.kind.outputs(source)}, {tokenizer.longest_text} tokens",
        *tokenizer.layout.notes,
        f"{layout.strategy.value}: {layout.replicate} x {layout.shard} ranks (replicate x shard), "
        f"{len(blocks)} {' and '.join(dict.fromkeys(classes)) or 'block'} + root{memory}; {layout.reason}",
        *source.kind.notes(source),
        *([] if adapted is None else [describe_adapters(adapted, encoder)]),
    ]


def _describe_reduction_per_chunk(costs: ModelSpec) -> str:
    """The line of a training whose ranks have no memory for full gradients."""
    size = 4 * costs.weights.trained / 2**30
    return f"gradients are reduced after every chunk: full ones would take {size:.1f} GiB on every rank"


def model_tokenizer(source: ModelSource, path: str | None = None, revision: str | None = None) -> TextTokenizer:
    """The model's tokenizer, or that in `path`, with the layout and the maximal lengths of the model.

    Each tower has its own.
    """
    if not source.towers:
        return bound_tokenizer(source, load_tokenizer(source, path, revision))
    towers = []
    for role, tower in source.towers.items():
        with tower_options_named(role):
            towers.append(model_tokenizer(tower))
    return TextTokenizer(towers[-1].tokenizer, max(tower.max_length for tower in towers), TowerLayout(*towers))


def bound_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """The tokenizer with the layout and the maximal lengths of the model."""
    check_vocabulary(source, tokenizer)
    max_length = resolve_max_length(source, tokenizer)
    return TextTokenizer(tokenizer, max_length, source.kind.layout(source, tokenizer))


def prepare_packing(
    encoder: Encoder, attention: Attention, parallel: ParallelConfig, capability: tuple[int, int]
) -> PackingCheck:
    """Check whether GPUs and the model's code support packing, and enable it unless `model.attention=padded`.

    `capability` is the lowest `compute_capability` of the ranks. With `model.attention=packed`, a ConfigError if the
    GPUs do not support packing, and a ModelError if the model does not.
    """
    if attention is Attention.padded:
        return PackingCheck("requested")
    if not encoder.has_layers:
        return PackingCheck(None)
    limit = packing_limit(parallel.precision, capability)
    if limit is not None and attention is Attention.packed:
        raise _unsupported(limit, ConfigError)
    support = check_packing(encoder, precision=parallel.precision, capability=capability)
    if support.padding_reason is None:
        enable_packing(encoder)
    elif attention is Attention.packed:
        raise _unsupported(support.padding_reason)
    return support


def packing_notes(
    encoder: Encoder, support: PackingCheck, attention: Attention, world: World, *, trains: bool
) -> list[str]:
    """Lines for the user; chooses the encoder's GPU kernel that they report."""
    if support.padding_reason is not None:
        return [f"texts are padded: {support.padding_reason}"] if attention is Attention.auto else []
    if world.device.type != "cuda" or not support.head_sizes:
        return []
    kernel = choose_flash_attention(world.device, support.head_sizes)
    set_packed_kernel(encoder, kernel)
    note = f"texts are packed, attention by FlashAttention {3 if kernel == FLASH_ATTENTION_3 else 2}"
    if trains and support.dropout:
        note += (
            f", which has no dropout for packed texts: attention dropout ({support.dropout:g}) is skipped; write "
            "model.attention=padded to apply it"
        )
    return [note]


def verify_packed_vectors(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> str | None:
    """Why packed texts have different vectors on any rank; packing is then disabled. A collective.

    A ModelError if they differ and `model.attention=packed`.
    """
    if not encoder.has_layers:
        return None
    mismatches = [
        _mismatch_of_tower(encoder, number, tower, parallel, world)
        for number, tower in enumerate(encoder.towers.values())
        if tower.has_layers and tower.packs
    ]
    mismatch = next((text for text in mismatches if text is not None), None)
    reason = next((text for text in world.gather(mismatch) if text is not None), None)
    if reason is not None:
        if attention is Attention.packed:
            raise _unsupported(reason)
        disable_packing(encoder)
    return reason


def _mismatch_of_tower(
    encoder: Encoder, number: int, tower: Encoder, parallel: ParallelConfig, world: World
) -> str | None:
    """Why packed texts have other vectors than padded ones in a tower of the encoder. A collective."""
    config, training = tower.backbone.config, encoder.training
    assert isinstance(config, PretrainedConfig)
    head = tower.output

    def computed(chunk: Chunk) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = encoder(chunk.replaced(tower=number))
        return parts

    encoder.eval()
    with tower.computing(lambda chunk: head.compared(tower.hidden_states(chunk), chunk)):
        mismatch = packing_mismatch(
            computed,
            config,
            parallel.precision,
            world.device,
            token_types=head.reads_pairs and has_token_types(tower),
            token_vectors=head.compares_tokens,
        )
    encoder.train(training)
    reshard(encoder)
    return mismatch or window_mismatch(config, parallel.precision, world.device, tower.packed_kernel)


def verify_outputs(encoder: Encoder, source: ModelSource, world: World) -> None:
    """Reject a model whose outputs cannot be right. A collective."""
    training = encoder.training
    error = source.kind.output_error(encoder.eval(), source, world.device)
    encoder.train(training)
    reshard(encoder)
    for reason in world.gather(error):
        if reason is not None:
            raise ModelError(reason)


def _unsupported(reason: str, error: type[EmbedtrainError] = ModelError) -> EmbedtrainError:
    return error(f"model.attention=packed: {reason}; write model.attention=auto or padded")
