"""The facts of docs/other-libraries.md that the installed sentence-transformers can confirm."""

import random
import re
import subprocess
import sys

import pytest
import sentence_transformers
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn

from embedtrain.distributed.world import World
from tests.conftest import ROOT
from tests.docs.pages import blocks
from tests.losses.test_sentence_transformers import PrecomputedVectors

PAGE = ROOT / "docs" / "other-libraries.md"
ROWS, WIDTH, SIZE = 16, 12, 8


class LinearEncoder(PrecomputedVectors):
    """One layer: gradient caching runs it again in the backward pass."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__("inputs")
        self.weight = nn.Parameter(weight)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["inputs"] @ self.weight}


def gradient_of(name: str, arguments: dict[str, object], rank: int, size: int) -> Tensor:
    """The gradient of a linear encoder by the class of sentence-transformers, of the rows of one rank."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    documents = queries + torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    scores = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    classes = torch.randint(4, (ROWS,), generator=generator)
    encoder = LinearEncoder(torch.randn(WIDTH, SIZE, generator=generator, dtype=torch.float64))
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)

    model = SentenceTransformer(modules=[encoder], device="cpu")
    guide = {"guide": SentenceTransformer(modules=[PrecomputedVectors("inputs")], device="cpu")}
    loss = getattr(losses, name)(model, **arguments, **(guide if "GIST" in name else {})).double()
    columns = [queries] if name.startswith("Batch") else [queries, documents]
    labels = classes if name.startswith("Batch") else scores.round() if "Contrastive" in name else scores
    features = [{"inputs": column[own]} for column in columns]
    random.seed(0)
    value = loss(features, labels[own])
    (sum(value.values()) if isinstance(value, dict) else value).backward()
    return encoder.weight.grad


def rank_gradients(world: World, cases: list[tuple[str, dict[str, object]]]) -> list[Tensor]:
    return [gradient_of(name, arguments, world.rank, world.size) for name, arguments in cases]


def rows_of_the_table() -> list[tuple[str, str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+Loss)(\(gather_across_devices=True\))?` \|.*\| (exact|[\d.]+) \|$", text, re.MULTILINE)


# `make test-newest` may install a version whose losses compute something else than the page says of version 6.
@pytest.mark.skipif(
    not sentence_transformers.__version__.startswith("6."),
    reason="docs/other-libraries.md describes sentence-transformers 6",
)
def test_the_gradients_of_sentence_transformers_on_two_ranks(ranks):
    """DDP and FSDP average the gradients of the ranks."""
    table = rows_of_the_table()
    assert len(table) >= 8
    cases = [(name, {"gather_across_devices": True} if argument else {}) for name, argument, _ in table]
    of_ranks = ranks(2, rank_gradients, cases)
    for (name, argument, shown), *gradients in zip(table, *of_ranks, strict=True):
        exact = gradient_of(name, {}, 0, 1)
        error = float((torch.stack(gradients).mean(0) - exact).norm() / exact.norm())
        assert shown == ("exact" if error < 1e-9 else f"{error:.2f}"), (name, argument, error)


def test_duplicates_that_the_batches_of_one_step_share():
    """The batches of a step are consecutive ones of the sampler, one for each rank."""
    (claim,) = re.findall(r"(\d+) of (\d+) documents are also in the batch of the other rank", PAGE.read_text("utf-8"))
    rows = Dataset.from_dict({"anchor": [f"q{i}" for i in range(256)], "positive": [f"d{i % 32}" for i in range(256)]})
    sampler = NoDuplicatesBatchSampler(rows, 16, drop_last=True, generator=torch.Generator().manual_seed(0))
    ranks = [BatchSamplerShard(sampler, 2, rank, even_batches=False) for rank in range(2)]
    shared = total = 0
    for pair in zip(*ranks, strict=True):
        one, other = ([rows["positive"][index] for index in batch] for batch in pair)
        assert len(set(one)) == len(one), "no duplicate within a rank"
        shared += sum(text in other for text in one)
        total += len(one)
    assert (str(shared), str(total)) == claim


@pytest.mark.slow
def test_the_check_of_the_page_runs(tmp_path):
    """Exact with the gather that keeps the gradient; without it, the direction differs."""
    (block,) = (block for block in blocks(PAGE) if block.language == "python" and "torchrun" in block.text)
    script = block.text
    assert script.count("torch.cat(all_gather(documents))") == 1
    outputs = []
    for number, text in enumerate((script, script.replace("torch.cat(all_gather(documents))", "documents"))):
        file = tmp_path / f"check{number}.py"
        file.write_text(text.replace("rank * ROWS // ranks + " if number else "\0", ""), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(done.stdout.strip())
    assert outputs[0] == "norm 1.000, cosine 1.000"
    assert re.fullmatch(r"norm \d\.\d+, cosine 0\.\d+", outputs[1])
