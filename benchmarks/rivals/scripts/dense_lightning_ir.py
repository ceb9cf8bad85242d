"""DprConfig with InBatchCrossEntropy, which Lightning IR's guide recommends for in-batch negatives.

Embeddings are pooled as the start model pools (mean); the scores are dot products, since the library has no
temperature. See lightning_ir_fit.py for the rest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from lightning_ir_fit import fit


def main(training: Training) -> None:
    """Train and save."""
    options = {
        "query_length": training.query_max_length,
        "doc_length": training.document_max_length,
        "pooling_strategy": "mean",
        "projection": None,
    }
    model = {
        "class_path": "lightning_ir.BiEncoderModule",
        "init_args": {"config": {"class_path": "lightning_ir.models.DprConfig", "init_args": options}},
    }
    fit(training, model, ["lightning_ir.InBatchCrossEntropy"])


if __name__ == "__main__":
    main(read_training())
