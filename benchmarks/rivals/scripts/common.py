"""The settings that every script reads, the events that it reports, and its end.

`python SCRIPT SETTINGS` or `torchrun --nproc-per-node N SCRIPT SETTINGS`: SETTINGS is a JSON file with the fields of
`Training`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Training:
    """One training.

    Attributes:
        kind: dense, reranker, late_interaction or sparse.
        model: directory to start from.
        data: JSONL file of rows `{"query": str, "pos": [str], "neg": [str, ...]}`.
        output: directory of the run; the trained model goes to `model` inside it.
        events: JSONL file that `report` appends to.
        steps: optimizer steps.
        global_batch: rows per step over all ranks.
        ranks: number of ranks.
        seed: seed of the data order and of new weights.
        precision: fp32 or bf16 (of the forward and backward pass; weights and optimizer are fp32).
        query_max_length, document_max_length: tokens, including special tokens; of pairs, their sum is the limit.
        negatives: hard negatives per row that are used.
        lr, warmup, weight_decay, temperature: peak learning rate, fraction of the steps, AdamW's decay, divisor of the
            similarities. None: what the library's documentation recommends, which the script states.
        schedule: the learning rate after warm-up falls linearly to 0.
        max_grad_norm: norm that the gradient is clipped to; 0: not clipped.
        save_every: a checkpoint that training can resume from every so many steps; 0: none.
        resume: continue the run in `output` as the library documents it.
    """

    kind: str
    model: str
    data: str
    output: str
    events: str
    steps: int
    global_batch: int
    ranks: int
    seed: int
    precision: str
    query_max_length: int
    document_max_length: int
    negatives: int
    lr: float | None
    warmup: float | None
    weight_decay: float | None
    temperature: float | None
    max_grad_norm: float
    save_every: int
    resume: bool

    @property
    def rank_batch(self) -> int:
        """Rows per step on each rank."""
        return self.global_batch // self.ranks

    @property
    def trained(self) -> str:
        """Where the trained model goes."""
        return str(Path(self.output) / "model")

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the training file."""
        with open(self.data, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def report(self, event: str, step: int = 0) -> None:
        """Append an event with the time of day: `step` after an optimizer step, `saved`, `end`. On rank 0."""
        if int(os.environ.get("RANK", "0")) == 0:
            with open(self.events, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, "step": step, "time": time.time()}) + "\n")


def end_process_group() -> None:
    """Leave the process group of torch, which libraries do not at the end of a training.

    A process that ends with a group of gloo aborts at times, and a finished training would count as failed.
    """
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def read_training() -> Training:
    """The training that the first argument names."""
    return Training(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
