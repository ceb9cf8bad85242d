"""MonoConfig with InfoNCE, Lightning IR's contrastive loss over a list of candidates.

The library has no recipe for rerankers. The loss is the softmax cross-entropy over the positive and the negatives of
each row, so it needs negatives. The layers are those of the start model, but the pooler and the classifier are new,
since the library names them otherwise. See lightning_ir_fit.py for the rest.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from lightning_ir_fit import fit, save_like_start


def save(training: Training, weights: dict[str, torch.Tensor]) -> None:
    """Save with the names of BertForSequenceClassification."""
    layers = {"bert_pool.0": "bert.pooler.dense", "linear": "classifier"}

    def renamed(name: str) -> str:
        layer, _, kind = name.rpartition(".")
        return f"{layers.get(layer, f'bert.{layer}')}.{kind}"

    save_like_start(training, {renamed(name): weight for name, weight in weights.items()})


def main(training: Training) -> None:
    """Train and save."""
    options = {
        "query_length": training.query_max_length,
        "doc_length": training.document_max_length,
        "pooling_strategy": "bert_pool",
        "linear_bias": True,
    }
    model = {
        "class_path": "lightning_ir.CrossEncoderModule",
        "init_args": {"config": {"class_path": "lightning_ir.models.MonoConfig", "init_args": options}},
    }
    fit(training, model, ["lightning_ir.InfoNCE"], save=save)


if __name__ == "__main__":
    main(read_training())
