"""Whether a model's texts are packed or padded: as the recipe says, as its code allows, and as its vectors show."""

from transformers import PretrainedConfig

from embedtrain.config.recipe import Attention, ParallelConfig
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import Look, look, pack, unpack, why_not_alike


def look_at(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> Look:
    """What the model's code allows; the encoder is prepared for packed texts if it does and they are wanted.

    Raises:
        ModelError: `model.attention=packed`, and it does not.
    """
    if attention is Attention.padded:
        return Look("asked for")
    found = look(encoder, precision=parallel.precision, gpu=world.device.type == "cuda")
    if found.why_padded is None:
        pack(encoder)
    elif attention is Attention.packed:
        raise _refused(found.why_padded)
    return found


def notes_on(found: Look, attention: Attention, world: World, *, trains: bool) -> list[str]:
    """What the user should know of it."""
    if found.why_padded is not None:
        return [f"texts are padded: {found.why_padded}"] if attention is Attention.auto else []
    if world.device.type == "cuda" and trains and found.dropout:
        return [
            f"texts are packed, and the GPU's kernel for that has no dropout: attention's own ({found.dropout:g}) is "
            "left out; model.attention=padded keeps it"
        ]
    return []


def why_it_must_pad(encoder: Encoder, attention: Attention, parallel: ParallelConfig, world: World) -> str | None:
    """Why packed texts have other vectors with these weights, on any rank; the encoder takes padded ones then.

    A collective, for an encoder that `look_at` prepared.

    Raises:
        ModelError: `model.attention=packed`, and they have.
    """
    config = encoder.backbone.config
    assert isinstance(config, PretrainedConfig)
    training = encoder.training
    found = why_not_alike(encoder.eval(), config, parallel.precision, world.device)
    encoder.train(training)
    reshard(encoder)
    why = next((one for one in world.gather(found) if one is not None), None)
    if why is not None:
        if attention is Attention.packed:
            raise _refused(why)
        unpack(encoder)
    return why


def _refused(why: str) -> ModelError:
    return ModelError(f"model.attention=packed: {why}; write model.attention=auto or padded")
