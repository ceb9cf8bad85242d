"""Verifies a loaded model: packed texts against padded ones, and scores against transformers' own class."""

from transformers import PretrainedConfig

from embedtrain.config.recipe import Attention, ParallelConfig
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError, ModelError
from embedtrain.models.attention import packing_limit, select_flash_attention, use_flash_attention_2
from embedtrain.models.encoder import Encoder, has_token_types, hidden_states
from embedtrain.models.packing import (
    PackingCheck,
    check_packing,
    disable_packing,
    enable_packing,
    packing_mismatch,
    window_mismatch,
)
from embedtrain.models.types import ModelSource


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


def packing_notes(support: PackingCheck, attention: Attention, world: World, *, trains: bool) -> list[str]:
    """Lines for the user; selects the GPU kernel that they report."""
    gpu = world.device.type == "cuda"
    if support.padding_reason is not None:
        if gpu and trains:  # an earlier model of this process may have been packed
            use_flash_attention_2()
        return [f"texts are padded: {support.padding_reason}"] if attention is Attention.auto else []
    if not gpu or not support.head_sizes:
        return []
    note = f"texts are packed, attention by {select_flash_attention(world.device, support.head_sizes)}"
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
    config = encoder.backbone.config
    assert isinstance(config, PretrainedConfig)
    if not encoder.has_layers:
        return None
    training = encoder.training
    head, backbone = encoder.output, encoder.backbone
    with encoder.computing(lambda chunk: head.compared(hidden_states(backbone, chunk), chunk)):
        mismatch = packing_mismatch(
            encoder.eval(),
            config,
            parallel.precision,
            world.device,
            token_types=head.reads_pairs and has_token_types(encoder),
            token_vectors=head.compares_tokens,
        )
    encoder.train(training)
    reshard(encoder)
    mismatch = mismatch or window_mismatch(config, parallel.precision, world.device)
    reason = next((text for text in world.gather(mismatch) if text is not None), None)
    if reason is not None:
        if attention is Attention.packed:
            raise _unsupported(reason)
        disable_packing(encoder)
        if world.device.type == "cuda":
            use_flash_attention_2()
    return reason


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
