"""The model that a door is to load, as its options say it."""

from embedtrain.config.door_options import EvaluateOptions
from embedtrain.config.lora import LoraConfig
from embedtrain.config.mining import MineOptions
from embedtrain.config.schema import ModelConfig


def model_of(options: EvaluateOptions | MineOptions) -> ModelConfig:
    """Directory or Hub id, with what differs from what it says itself."""
    return ModelConfig(
        path=options.model,
        lora=LoraConfig(path=options.adapter),
        pooling=options.pooling,
        normalize=options.normalize,
        max_length=options.max_length,
        query_prompt=options.query_prompt,
        document_prompt=options.document_prompt,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )
