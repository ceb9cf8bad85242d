"""What a published model has beside what is trained: the pooler, carried through so that nothing is missing."""

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from embedtrain.models.build import stored_tensors
from embedtrain.models.encoder import prepare_backbone
from embedtrain.models.source import ModelSource


def untrained_tensors(source: ModelSource) -> dict[str, Tensor]:
    """The backbone's tensors that `prepare_backbone` takes away, by the backbone's own names.

    They are the source's where it stores them, else zeros. Left out of an export, transformers would make
    them up at random and print a report of missing weights at everyone who opens the model.
    """
    with init_empty_weights(include_buffers=False):
        backbone = AutoModel.from_config(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
    shapes = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    dropped = shapes.keys() - prepare_backbone(backbone).state_dict().keys()
    stored = stored_tensors(source.directory) if source.directory is not None and dropped else {}
    found: dict[str, Tensor] = {}
    for name in sorted(dropped):
        found[name] = torch.zeros(shapes[name])
        for key in (name, f"{backbone.base_model_prefix}.{name}"):
            if key in stored:
                with safe_open(stored[key].path, framework="pt") as file:
                    tensor = file.get_tensor(key)
                if tensor.shape == shapes[name]:
                    found[name] = tensor.float()
    return found
