"""The number of tokens for which a model has positions, measured on a small model of the same class.

Some models count positions from the padding id on, so that their last positions cannot be reached: RoBERTa and what was
made from it. Their configuration does not say so, and a longer text ends in an index out of bounds.
"""

import contextlib
import functools
import json

import torch
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig

from embedtrain.models.rope import has_rotary_positions

_POSITIONS = 24  # of the small model
_PADDING = 3  # its padding id; models with a constant number of unused positions have less than 3
_SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": _POSITIONS}
_NARROW = {"hidden_size": 16, "embedding_size": 16, "intermediate_size": 16, "head_dim": 8}
_MAX_WIDTH = 2048  # of a class that cannot have 16 dimensions, and is built with those of the model
_TOKEN = 5  # any but special ones


def num_positions(config: PretrainedConfig) -> int:
    """The most tokens of a text; 0 if the configuration sets no limit."""
    text = config.get_text_config()
    limit = max(0, int(getattr(text, "max_position_embeddings", 0) or 0))  # XLNet says -1
    if not limit or has_rotary_positions(text):
        return limit
    unused = _unused_positions(text.model_type, text.to_json_string())
    return limit - (int(text.pad_token_id or 0) + 1 if unused > _PADDING else unused)


@functools.lru_cache(maxsize=8)
def _unused_positions(model_type: str, content: str) -> int:
    """The positions that no text reaches in a model of this type with the padding id 3; 0 if none can be built."""
    if model_type not in CONFIG_MAPPING:  # code of the model's own
        return 0
    kind, values = CONFIG_MAPPING[model_type], json.loads(content)
    for sizes in (_SMALL | _NARROW, _SMALL):
        config = kind.from_dict(values)
        if sizes is _SMALL and int(getattr(config, "hidden_size", 0) or 0) > _MAX_WIDTH:
            break
        for name, value in values.items():
            if name.endswith("_token_id") and isinstance(value, int):
                setattr(config, name, 2)
        for name, size in sizes.items():
            if hasattr(config, name):
                setattr(config, name, size)
        config.pad_token_id = _PADDING
        # A class that cannot be built or run like this, with whatever error, is left to the second try.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            model = AutoModel.from_config(config, attn_implementation="eager").eval()
            model(input_ids=torch.full((1, 1), _TOKEN))
            return next(count for count in range(_POSITIONS) if _reaches(model, _POSITIONS - count))
    return 0


def _reaches(model: torch.nn.Module, length: int) -> bool:
    try:
        model(input_ids=torch.full((1, length), _TOKEN))
    except (IndexError, RuntimeError):  # of a table of positions, and of a buffer of as many token types
        return False
    return True
