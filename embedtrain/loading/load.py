"""From a recipe's model options to a sharded encoder with its tokenizer, weights read."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from embedtrain.config.recipe import ModelConfig, ParallelConfig, Strategy
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.mesh import ParallelLayout, free_memory_of_rank, memory_of_rank
from embedtrain.distributed.sharding import reshard, shard_, warm_up
from embedtrain.distributed.weights import broadcast_weights, copy_local_rows, read_shards
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.loading.attention import packing_notes, prepare_packing, verify_packed_vectors
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.adapters import AdapterInfo, add_adapters, base_name, described, frozen_dtype, initial_adapters
from embedtrain.models.attention_direction import attends_to_later_tokens
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import TensorLocation, build_encoder, full_state_dict, locate_weights, stored_dtype
from embedtrain.models.encoder import Encoder
from embedtrain.models.four_bit import four_bit_layers
from embedtrain.models.source import ModelSource, open_model_source
from embedtrain.models.tokenizer import check_vocabulary, load_tokenizer, resolve_max_length
from embedtrain.planning.memory import activation_tokens
from embedtrain.planning.model_costs import model_spec
from embedtrain.planning.strategy import choose, choose_encoding_layout
from embedtrain.planning.workload import ClusterSpec, StepWorkload

# What accelerate and transformers read the wrap list from; asked of us in the same way, and said so.
BLOCK_CLASS_VARIABLE = "FSDP_TRANSFORMER_CLS_TO_WRAP"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to train or to evaluate.

    Attributes:
        encoder: sharded in place over the ranks.
        source: what its directory or configuration says.
        tokenizer: bound to the length that is used.
        layout: how its weights lie over the ranks.
        notes: one line each, what was found and decided.
        adapted: the adapters that are trained; None where the model itself is.
        reduce_per_step: whether a rank holds whole gradients between the chunks of a step.
        activation_tokens: tokens of a step whose graphs a rank may keep.
    """

    encoder: Encoder
    source: ModelSource
    tokenizer: TextTokenizer
    layout: ParallelLayout
    notes: tuple[str, ...]
    reduce_per_step: bool
    activation_tokens: int = 0
    adapted: AdapterInfo | None = None


def load_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    read_weights: bool = True,
    trains: bool = True,
    work: StepWorkload | None = None,
) -> LoadedModel:
    """Build on the meta device, shard, then read each rank's part of the weights.

    Args:
        model: where the model comes from.
        parallel: how it lies over the ranks.
        world: the ranks; every rank must call.
        seed: random weights are a function of it.
        tokenizer: a tokenizer made on the spot, for a model without one; its ids go into the configuration.
        read_weights: false where a checkpoint's weights follow: then only what is frozen is read.
        trains: false where it will only encode, which takes less memory.
        work: what a step of training does; default: that of a recipe which says nothing.

    Raises:
        ConfigError, ModelError: on every rank alike, before any weight is read where that is possible.
    """
    quiet_libraries()
    memory, free = map(min, zip(*world.gather((memory_of_rank(world), free_memory_of_rank(world))), strict=True))
    with world.fail_together("opening the model"):
        source = open_model_source(model)
        if tokenizer is not None:
            fit_config_to_tokenizer(source, tokenizer)
        loaded = load_tokenizer(source, model.tokenizer, model.tokenizer_revision) if tokenizer is None else tokenizer
        check_vocabulary(source, loaded)
        length = resolve_max_length(source, loaded)
        files = open_adapter(model.lora)
        encoder = build_encoder(source)
        blocks, notes = _blocks(encoder, parallel, required=parallel.strategy in (Strategy.fsdp, Strategy.hsdp))
        places = locate_weights(source, {name: tensor.shape for name, tensor in encoder.state_dict().items()})
        seen = prepare_packing(encoder, model.attention, parallel, world)
        adapted: AdapterInfo | None = None
        if model.lora.on:
            frozen = frozen_dtype(model.lora.base_dtype, parallel.precision, stored_dtype(source))
            adapted = add_adapters(encoder, model.lora, files, frozen)
        gpu = world.device.type == "cuda"
        machines = ClusterSpec(ranks=world.size, per_node=world.local_size, memory=memory, gpu=gpu)
        packed = seen.padding_reason is None
        facts = model_spec(
            encoder, blocks, precision=parallel.precision, tokens_per_text=length, gpu=gpu, packed=packed
        )
        does = replace(work or StepWorkload(), tokens_per_text=length)
        choice = (
            choose(parallel, machines, facts, does) if trains else choose_encoding_layout(parallel, machines, facts)
        )
        layout = choice.layout
        kept = activation_tokens(facts, layout, machines, does, whole=choice.whole, free=free) if trains else 0
        if layout.strategy is not Strategy.ddp and not blocks:
            _blocks(encoder, parallel, required=True)
    notes.append(
        f"{type(encoder.backbone).__name__.removeprefix('FSDP')}, {facts.parameters:,} parameters, "
        f"{source.pooling.value} pooling{', normalised' if source.normalize else ''}, {length} tokens"
    )
    saved = ", activations recomputed" * layout.activation_checkpointing + ", in host memory" * layout.cpu_offload
    notes.append(
        f"{layout.strategy.value}: {layout.replicate} x {layout.shard} ranks (replicate x shard), "
        f"{len(blocks)} {type(blocks[0]).__name__ if blocks else 'block'} + root{saved}; {layout.reason}"
    )
    if adapted is not None:
        notes.append(described(adapted, encoder))
    shard_(encoder, blocks, layout, parallel, world.device)
    if read_weights or adapted is not None:
        notes.append(_read_weights(encoder, source, places, world, seed))
    if read_weights and adapted is not None:
        notes += _begin_adapters(encoder, adapted, model, world, seed)
    warm_up(encoder, world.device)
    if model.bidirectional is not None and (read_weights or adapted is not None):
        _require_direction(encoder, model.bidirectional, world)
    source = replace(source, max_length=length)
    if trains and not choice.whole:
        size = 4 * facts.trained / 2**30
        notes.append(f"gradients are reduced after every chunk: whole ones would take {size:.1f} GiB on every rank")
    bound = TextTokenizer(loaded, length, include_prompt=source.include_prompt, packed=seen.padding_reason is None)
    notes += packing_notes(seen, model.attention, world, trains=trains)
    made = LoadedModel(encoder, source, bound, layout, tuple(notes), choice.whole, kept, adapted)
    return verify_packing(made, model, parallel, world) if read_weights else made


def verify_packing(
    made: LoadedModel,
    model: ModelConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    say: Callable[[str], None] = lambda note: None,
) -> LoadedModel:
    """The model with its weights; its texts are padded from here on if packing them changes their vectors.

    A collective.

    Args:
        made: with weights.
        model: what the recipe says of it.
        parallel: as it was loaded.
        world: the ranks.
        say: is told why, if so; the notes are as well.

    Raises:
        ModelError: it does, and `model.attention=packed` asks for it.
    """
    tokenizer = made.tokenizer
    why = verify_packed_vectors(made.encoder, model.attention, parallel, world) if tokenizer.packed else None
    if why is None:
        return made
    note = f"texts are padded: {why}"
    say(note)
    padding = TextTokenizer(tokenizer.tokenizer, tokenizer.max_length, include_prompt=tokenizer.include_prompt)
    return replace(made, tokenizer=padding, notes=(*made.notes, note))


def fit_config_to_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a configuration fit a tokenizer trained on the data: size and special ids."""
    config = source.config.get_text_config()
    config.vocab_size = len(tokenizer)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        if getattr(tokenizer, name, None) is not None:
            setattr(config, name, getattr(tokenizer, name))


def quiet_libraries() -> None:
    """Keep the libraries' progress bars and advice off the terminal; their errors stay."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for name in ("sentence_transformers", "datasets", "huggingface_hub", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _blocks(encoder: Encoder, parallel: ParallelConfig, *, required: bool) -> tuple[list[nn.Module], list[str]]:
    from_environment = os.environ.get(BLOCK_CLASS_VARIABLE, "").strip(" ,")
    if parallel.block_class is None and from_environment:
        blocks = find_blocks(encoder, from_environment, asked_by=f"{BLOCK_CLASS_VARIABLE} (in the environment)")
        return blocks, [f"layer class {from_environment}: read from {BLOCK_CLASS_VARIABLE} in the environment"]
    return find_blocks(encoder, parallel.block_class, required=required), []


def _read_weights(
    encoder: Encoder, source: ModelSource, places: dict[str, TensorLocation] | None, world: World, seed: int
) -> str:
    tensors = {base: t for name, t in encoder.state_dict().items() if (base := base_name(name)) is not None}
    keeps = {
        str(base_name(name)): (torch.Size((layer.out_features, layer.in_features)), layer.quantize_weight)
        for name, layer in four_bit_layers(encoder)
    }
    if places is not None:
        with world.fail_together("reading the model's weights"):
            read_shards(tensors, places, keeps, world.device)
        return f"weights: every rank read its own slices of {source.directory}"
    broadcast_weights(tensors, keeps, world, lambda: full_state_dict(source, seed))
    if source.directory is None:
        return f"weights: random from seed {seed}, made on rank 0 and handed out"
    return f"weights: read on rank 0 from {source.directory} by transformers and handed out"


def _require_direction(encoder: Encoder, bidirectional: bool, world: World) -> None:
    """Look whether attention goes the way that was asked for: of configurations that name it not all models obey."""
    training = encoder.training
    found = attends_to_later_tokens(encoder.eval(), (0, 1, 2), world.device)
    encoder.train(training)
    reshard(encoder)
    if found is not bidirectional:
        ways = {
            True: "see those behind them",
            False: "do not see those behind them",
            None: "see them beside padding alone",
        }
        raise ModelError(
            f"model.bidirectional={str(bidirectional).lower()}, and tokens of this {type(encoder.backbone).__name__} "
            f"{ways[found]}: leave it out, or choose another model"
        )


def _begin_adapters(encoder: Encoder, adapted: AdapterInfo, model: ModelConfig, world: World, seed: int) -> list[str]:
    """Give adapters their first weights; every rank makes or reads all of them, and keeps its rows."""
    with world.fail_together("reading the adapter"):
        first = initial_adapters(encoder, adapted, seed)
        state = encoder.state_dict()
        with torch.no_grad():
            for name, whole in first.items():
                copy_local_rows(state[name], whole)
    if adapted.files is None:
        return []
    base = model.path if model.path is not None else "model.config"
    base_model = adapted.files.base_model
    other = f", made for {base_model} and put on {base}" if base_model not in ("", base) else ""
    return [f"adapter: read from {adapted.files.directory}{other}"]
