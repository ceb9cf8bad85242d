"""Verifies a loaded model: packed texts against padded ones, and scores against transformers' own class."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from embedtrain.config.recipe import Attention, ParallelConfig
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError, ModelError
from embedtrain.models.attention_kernels import packing_limit, select_flash_attention, use_flash_attention_2
from embedtrain.models.cross_encoder import CrossEncoder, classifier_mismatch, has_token_types
from embedtrain.models.encoder import Encoder
from embedtrain.models.late_interaction import LateInteractionEncoder, expansion_mismatch
from embedtrain.models.packing import (
    PackingCheck,
    check_packing,
    disable_packing,
    enable_packing,
    packing_mismatch,
    window_mismatch,
)
from embedtrain.models.sparse_encoder import SparseEncoder, language_model_mismatch
from embedtrain.models.types import ModelSource

EncoderT = TypeVar("EncoderT", bound=Encoder)


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
    is_cross_encoder = isinstance(encoder, CrossEncoder)
    # Scores near 0 have no relative difference, so the vectors that the head receives are compared.
    with encoder.returning_vectors() if isinstance(encoder, CrossEncoder) else contextlib.nullcontext():
        mismatch = packing_mismatch(
            encoder.eval(),
            config,
            parallel.precision,
            world.device,
            token_types=is_cross_encoder and has_token_types(encoder),
            token_vectors=isinstance(encoder, LateInteractionEncoder),
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
    """Reject a model of scores or of vectors of tokens whose outputs cannot be right. A collective."""
    if isinstance(encoder, CrossEncoder):
        reason = _mismatch(encoder, classifier_mismatch, world)
        if reason is not None:
            raise ModelError(f"{type(encoder.head).__name__} is not supported as a cross-encoder: {reason}")
    if isinstance(encoder, SparseEncoder):
        reason = _mismatch(encoder, language_model_mismatch, world)
        if reason is not None:
            raise ModelError(f"{type(encoder.head).__name__} is not supported as a sparse model: {reason}")
    expansion = None if source.kind.name != "late_interaction" else source.settings.expansion
    if isinstance(encoder, LateInteractionEncoder) and expansion is not None and not expansion.attend:
        reason = _mismatch(encoder, expansion_mismatch, world)
        if reason is not None:
            raise ModelError(
                "model.late_interaction.attend_to_expansion_tokens=false: expansion tokens of "
                f"{type(encoder.backbone).__name__.removeprefix('FSDP')} cannot be without attention, because "
                f"{reason}; set it to true, or model.late_interaction.query_expansion=none"
            )


def _mismatch(encoder: EncoderT, compare: Callable[[EncoderT, torch.device], str | None], world: World) -> str | None:
    """What `compare` finds wrong on any rank, without dropout; the same on every rank. A collective."""
    training = encoder.training
    mismatch = compare(encoder.eval(), world.device)
    encoder.train(training)
    reshard(encoder)
    return next((text for text in world.gather(mismatch) if text is not None), None)


def _unsupported(reason: str, error: type[EmbedtrainError] = ModelError) -> EmbedtrainError:
    return error(f"model.attention=packed: {reason}; write model.attention=auto or padded")
