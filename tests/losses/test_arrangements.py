"""The table of docs/exactness.md: gradients of other arrangements of in-batch negatives, computed in float64."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import ROOT

ROWS = 16  # of the global batch


def gradient(arrangement: str, ranks: int) -> Tensor:
    """The mean over the ranks of the gradients of a shared linear encoder, as DDP and FSDP compute it."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(ROWS, 12, generator=generator, dtype=torch.float64)
    documents = queries + torch.randn(ROWS, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 8, generator=generator, dtype=torch.float64).requires_grad_()

    def rank_loss(rank: int) -> Tensor:
        q, d = (F.normalize(texts @ weight, dim=1) for texts in (queries, documents))
        own = torch.zeros(ROWS, 1, dtype=torch.bool)
        local = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        own[local] = True
        targets = torch.arange(ROWS)
        if arrangement.startswith("full"):
            q, d = (torch.where(own, vectors, vectors.detach()) for vectors in (q, d))
            return F.cross_entropy(q @ d.T / 0.05, targets)
        if arrangement.startswith("no gather"):
            return F.cross_entropy(q[local] @ d[local].T / 0.05, targets[: ROWS // ranks])
        if "detached" in arrangement:
            d = torch.where(own, d, d.detach())
        return F.cross_entropy(q[local] @ d.T / 0.05, targets[local])

    loss = torch.stack([rank_loss(rank) for rank in range(ranks)]).mean()
    (result,) = torch.autograd.grad(loss, weight)
    return result.flatten()


def test_the_table_of_the_page():
    text = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \|([^|]*)\| ([\d. /]+) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    exact = gradient("exact", 1)
    before, factor = "", 1
    for name, norms, cosines in rows:
        multiplied = name.startswith("the same, multiplied")
        arrangement, is_scaled = (before, True) if multiplied else (name, False)
        before = arrangement
        for index, ranks in enumerate((2, 4)):
            factor = ranks if is_scaled else 1
            other = factor * gradient(arrangement, ranks)
            cosine = float(F.cosine_similarity(exact, other, dim=0))
            expected = cosines.split(" / ")[min(index, cosines.count("/"))]
            assert f"{cosine:.{len(expected.partition('.')[2])}f}" == expected, (name, ranks, cosine)
            if norms.strip():
                assert f"{float(other.norm() / exact.norm()):.4g}" == f"{float(norms.split(' / ')[index]):.4g}", name
