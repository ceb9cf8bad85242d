"""ColConfig of Recipe 3 of Lightning IR's guide, with InBatchCrossEntropy, its loss for in-batch negatives.

The projection and the marker tokens are new, since the library does not read those of the start model. See
lightning_ir_fit.py for the rest.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from lightning_ir_fit import fit, save_like_start


def read_json(training: Training, name: str) -> dict[str, Any]:
    """A file of the start model, which is in PyLate's layout."""
    return dict(json.loads((Path(training.model) / name).read_text(encoding="utf-8")))


def save(training: Training, weights: dict[str, torch.Tensor]) -> None:
    """Save in PyLate's layout: the markers take the rows of its markers, and the projection has a file of its own."""
    words = "embeddings.word_embeddings.weight"
    size = read_json(training, "config.json")["vocab_size"]
    table = weights[words]
    weights[words] = torch.cat([table[: size - 2], table[size : size + 2]])
    projection = weights.pop("projection.weight")
    save_like_start(training, weights)
    save_file({"linear.weight": projection}, Path(training.trained) / "1_Dense" / "model.safetensors")


def main(training: Training) -> None:
    """Train and save."""
    options = {
        "query_length": training.query_max_length,
        "doc_length": training.document_max_length,
        "similarity_function": "dot",
        "query_aggregation_function": "sum",
        "query_expansion": True,
        "normalization_strategy": "l2",
        "add_marker_tokens": True,
        "projection": "linear_no_bias",
        "doc_mask_scoring_tokens": "punctuation",  # not in the recipe; as the start model and the other libraries
    }
    model = {
        "class_path": "lightning_ir.BiEncoderModule",
        "init_args": {
            "config": {"class_path": "lightning_ir.models.ColConfig", "init_args": options},
            # 0.0.6 does not read it from the configuration
            "model_kwargs": {"embedding_dim": read_json(training, "1_Dense/config.json")["out_features"]},
        },
    }
    fit(training, model, ["lightning_ir.InBatchCrossEntropy"], save=save)


if __name__ == "__main__":
    main(read_training())
