"""A bi-encoder's training loop written by hand with accelerate and transformers: in-batch negatives of all ranks.

Mean pooling, cosine similarities; documents are gathered with their gradient. A temperature that a training leaves open
is 0.05, as in SimCSE. Other recommended values: accelerate_loop.py.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer, BatchEncoding

sys.path.insert(0, str(Path(__file__).parent))
from accelerate_loop import Row, train
from common import Training, read_training


class BiEncoder(nn.Module):
    """Embeds queries and documents in one call, as DistributedDataParallel asks for."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained(path, add_pooling_layer=False)

    def forward(self, *batches: BatchEncoding) -> tuple[Tensor, ...]:
        """Normalised means [N, D] over the tokens of each batch."""
        return tuple(self.embed(batch) for batch in batches)

    def embed(self, batch: BatchEncoding) -> Tensor:
        """Normalised means [N, D] over the tokens."""
        hidden = self.backbone(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def main(training: Training) -> None:
    """Train and save."""
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    multiple = 8 if torch.cuda.is_available() else None
    temperature = 0.05 if training.temperature is None else training.temperature

    def tokens(texts: list[str], max_length: int) -> BatchEncoding:
        options: Any = {"truncation": True, "padding": True, "return_tensors": "pt", "pad_to_multiple_of": multiple}
        return tokenizer(texts, max_length=max_length, **options)

    def collate(rows: list[Row]) -> tuple[BatchEncoding, BatchEncoding]:
        documents = [row["pos"][0] for row in rows]
        documents += [text for row in rows for text in row["neg"][: training.negatives]]
        return (
            tokens([row["query"] for row in rows], training.query_max_length),
            tokens(documents, training.document_max_length),
        )

    def loss(model: nn.Module, batch: tuple[BatchEncoding, BatchEncoding], accelerator: Accelerator) -> Tensor:
        queries, documents = model(*batch)
        first = 0
        if accelerator.num_processes > 1:
            first = accelerator.process_index * len(documents)
            documents = all_gather_single_autograd(documents, 0, torch.distributed.group.WORLD)
        labels = torch.arange(len(queries), device=queries.device) + first
        return cross_entropy(queries @ documents.T / temperature, labels)

    def save(model: nn.Module) -> None:
        model.backbone.save_pretrained(training.trained)
        tokenizer.save_pretrained(training.trained)

    train(training, lambda: BiEncoder(training.model), collate, loss, save)


if __name__ == "__main__":
    main(read_training())
