"""Decides whether a model's texts are packed or padded: by the recipe, the model's code and its vectors."""

from transformers import PretrainedConfig

from embedtrain.config.recipe import Attention, ParallelConfig
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import PackingCheck, check_packing, disable_packing, enable_packing, packing_mismatch


def prepare_packing(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> PackingCheck:
    """Check whether the model's code supports packing, and enable it unless `model.attention=padded`.

    A ModelError if it does not and `model.attention=packed`.
    """
    if attention is Attention.padded:
        return PackingCheck("requested")
    support = check_packing(encoder, precision=parallel.precision, gpu=world.device.type == "cuda")
    if support.padding_reason is None:
        enable_packing(encoder)
    elif attention is Attention.packed:
        raise _unsupported(support.padding_reason)
    return support


def packing_notes(support: PackingCheck, attention: Attention, world: World, *, trains: bool) -> list[str]:
    """Lines for the user."""
    if support.padding_reason is not None:
        return [f"texts are padded: {support.padding_reason}"] if attention is Attention.auto else []
    if world.device.type == "cuda" and trains and support.dropout:
        return [
            f"texts are packed, and the GPU kernel for packed texts has no dropout: attention dropout "
            f"({support.dropout:g}) is skipped; write model.attention=padded to apply it"
        ]
    return []


def verify_packed_vectors(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> str | None:
    """Why packed texts have different vectors on any rank; packing is then disabled. A collective.

    A ModelError if they differ and `model.attention=packed`.
    """
    config = encoder.backbone.config
    assert isinstance(config, PretrainedConfig)
    training = encoder.training
    mismatch = packing_mismatch(encoder.eval(), config, parallel.precision, world.device)
    encoder.train(training)
    reshard(encoder)
    reason = next((text for text in world.gather(mismatch) if text is not None), None)
    if reason is not None:
        if attention is Attention.packed:
            raise _unsupported(reason)
        disable_packing(encoder)
    return reason


def _unsupported(reason: str) -> ModelError:
    return ModelError(f"model.attention=packed: {reason}; write model.attention=auto or padded")
