"""Whether a model's texts are packed or padded: as the recipe says, as its code allows, and as its vectors show."""

from transformers import PretrainedConfig

from embedtrain.config.recipe import Attention, ParallelConfig
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import PackingCheck, check_packing, disable_packing, enable_packing, packing_mismatch


def prepare_packing(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> PackingCheck:
    """What the model's code allows; the encoder is prepared for packed texts if it does and they are wanted.

    Raises:
        ModelError: `model.attention=packed`, and it does not.
    """
    if attention is Attention.padded:
        return PackingCheck("asked for")
    found = check_packing(encoder, precision=parallel.precision, gpu=world.device.type == "cuda")
    if found.padding_reason is None:
        enable_packing(encoder)
    elif attention is Attention.packed:
        raise _refused(found.padding_reason)
    return found


def packing_notes(found: PackingCheck, attention: Attention, world: World, *, trains: bool) -> list[str]:
    """What the user should know of it."""
    if found.padding_reason is not None:
        return [f"texts are padded: {found.padding_reason}"] if attention is Attention.auto else []
    if world.device.type == "cuda" and trains and found.dropout:
        return [
            f"texts are packed, and the GPU's kernel for that has no dropout: attention's own ({found.dropout:g}) is "
            "left out; model.attention=padded keeps it"
        ]
    return []


def verify_packed_vectors(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> str | None:
    """Why packed texts have other vectors with these weights, on any rank; the encoder takes padded ones then.

    A collective, for an encoder that `prepare_packing` prepared.

    Raises:
        ModelError: `model.attention=packed`, and they have.
    """
    config = encoder.backbone.config
    assert isinstance(config, PretrainedConfig)
    training = encoder.training
    found = packing_mismatch(encoder.eval(), config, parallel.precision, world.device)
    encoder.train(training)
    reshard(encoder)
    why = next((one for one in world.gather(found) if one is not None), None)
    if why is not None:
        if attention is Attention.packed:
            raise _refused(why)
        disable_packing(encoder)
    return why


def _refused(why: str) -> ModelError:
    return ModelError(f"model.attention=packed: {why}; write model.attention=auto or padded")
