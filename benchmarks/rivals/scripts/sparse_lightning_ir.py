"""SpladeConfig with InBatchCrossEntropy and FLOPSRegularization, as Recipe 2 of Lightning IR's guide recommends.

FLOPS weights 0.0008 and 0.0006, of which the warm-up is the recipe's share of its steps: 0 for the first half, then
linear over a fifth. The recipe's key `loss_functions.1.query_weight` fails with 0.0.6, where a loss and its weight are
a tuple. See lightning_ir_fit.py for the rest.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from lightning_ir_fit import fit, save_like_start


def save(training: Training, weights: dict[str, torch.Tensor]) -> None:
    """Save with the names of BertForMaskedLM, whose decoder is the word embeddings."""
    head = "projection."
    named = {(f"cls.{n.removeprefix(head)}" if n.startswith(head) else f"bert.{n}"): w for n, w in weights.items()}
    save_like_start(training, {name: weight for name, weight in named.items() if ".decoder." not in name})


def main(training: Training) -> None:
    """Train and save."""
    options = {"query_length": training.query_max_length, "doc_length": training.document_max_length}
    model = {
        "class_path": "lightning_ir.BiEncoderModule",
        "init_args": {"config": {"class_path": "lightning_ir.models.SpladeConfig", "init_args": options}},
    }
    flops = {
        "class_path": "lightning_ir.FLOPSRegularization",
        "init_args": {"query_weight": 0.0008, "doc_weight": 0.0006},
    }
    schedule = {
        "class_path": "lightning_ir.GenericConstantSchedulerWithLinearWarmup",
        "init_args": {
            "keys": ["loss_functions.1.0.query_weight", "loss_functions.1.0.doc_weight"],
            "num_warmup_steps": training.steps // 5,
            "num_delay_steps": training.steps // 2,
        },
    }
    fit(training, model, ["lightning_ir.InBatchCrossEntropy", flops], [schedule], save)


if __name__ == "__main__":
    main(read_training())
