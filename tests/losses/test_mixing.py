"""Mixed negatives of InfoNCE against the plain formula in one process, and how they are drawn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Hardness, Implementation, InfoNCEConfig, LossDirection
from embedtrain.losses.build import build_loss
from embedtrain.losses.mixing import Draws
from embedtrain.losses.types import BatchInfo, GlobalRows, Origin
from tests.losses.global_batch import Case, GlobalVectors, check_all, vectors

# Rows with 4, 2, 1, 0 and 3 hard negatives: the third and the fourth have nothing to mix.
SIZES = (5, 3, 2, 1, 4)
ALL = {"mixed_pairs": 2, "mixed_list": True}
CASES = [
    *(
        InfoNCEConfig(implementation=implementation, learn_temperature=True, temperature=0.3, focal=0.5, **ALL)
        for implementation in (Implementation.plain, Implementation.tiled, Implementation.ring)
    ),
    InfoNCEConfig(
        temperature=0.2, mixed_pairs=3, false_negative_margin=0.1, hardness=Hardness.hard, hardness_strength=2.0
    ),
    InfoNCEConfig(temperature=0.3, in_batch_negatives=False, margin=0.1, focal=2.0, learn_temperature=True, **ALL),
    InfoNCEConfig(
        temperature=0.3,
        mixed_list=True,
        implementation=Implementation.ring,
        directions=[LossDirection.query_document, LossDirection.query_query],
    ),
]


def info_of(batch: GlobalVectors) -> BatchInfo:
    """All rows on one rank."""
    rows = GlobalRows(
        rank=0,
        num_rows=[len(batch.sizes)],
        num_documents=np.array(batch.sizes),
        query_keys=batch.query_keys.numpy(),
        document_keys=batch.document_keys.numpy(),
    )
    return BatchInfo(
        owners=torch.arange(len(batch.sizes)).repeat_interleave(torch.tensor(batch.sizes)),
        query_keys=batch.query_keys,
        document_keys=batch.document_keys,
        origin=Origin(batch=5),  # that of GlobalVectors.of_rank
        global_rows=rows,
    )


def textbook(config: InfoNCEConfig):
    seed = build_loss(config, dimension=8, seed=0).mixing_seed

    def loss(batch: GlobalVectors, parameters: dict[str, Tensor]) -> Tensor:
        scale = parameters["temperature.log_scale"].exp() if config.learn_temperature else 1 / config.temperature
        queries, documents = F.normalize(batch.queries, dim=1), F.normalize(batch.documents, dim=1)
        draws = Draws.of(info_of(batch), config.mixed_pairs, seed)
        total = queries.new_zeros(())
        for row, query in enumerate(queries):
            positive, *own = batch.documents_of(row)
            right = query @ documents[positive]
            limit = torch.inf if config.false_negative_margin is None else right.item() + config.false_negative_margin

            def scored(similarity: Tensor, hard: bool, limit: float = limit) -> list[Tensor]:
                bonus = config.hardness_strength * similarity.detach() if hard else 0.0
                return [similarity * scale + bonus] if similarity.item() <= limit else []

            equal = [other for other, key in enumerate(batch.query_keys) if key == batch.query_keys[row]]
            answers = {batch.document_keys[batch.documents_of(other)[0]].item() for other in equal}
            excluded = [index for index, key in enumerate(batch.document_keys.tolist()) if key in answers]
            kept = [index for index in own if query @ documents[index] <= limit and index not in excluded]
            mixtures = []
            for first, second, fraction in zip(draws.first[row], draws.second[row], draws.fraction[row], strict=True):
                if len(own) >= 2 and {first.item(), second.item()} <= set(kept):
                    mixtures.append(fraction * documents[first] + (1 - fraction) * documents[second])
            if config.mixed_list and len(kept) >= 2:
                weights = (documents[kept] @ query * scale).detach().softmax(dim=0)
                mixtures.append(weights @ documents[kept])
            compared = range(len(documents)) if config.in_batch_negatives else own
            scores = [(right - config.margin) * scale]
            for index in compared:
                if index not in excluded:
                    scores += scored(query @ documents[index], hard=index in own)
            for mixture in mixtures:
                scores += scored(query @ F.normalize(mixture, dim=0), hard=True)
            if LossDirection.query_query in config.directions:
                scores += [query @ other * scale for index, other in enumerate(queries) if index not in equal]
            log_p = torch.stack(scores).log_softmax(dim=0)[0]
            total = total - (1 - log_p.detach().exp()) ** config.focal * log_p
        return total / len(queries)

    return loss


def test_textbook(ranks):
    """On 1 and 3 ranks, and on 2 of which one has no rows."""
    cases = [Case(config, vectors(SIZES, seed=3), textbook(config)) for config in CASES]
    check_all(ranks, cases, only=[0, 2, 5])


def test_answers_are_not_mixed(ranks):
    """Hard negatives that equal the row's positive, or that of an equal query, by text."""
    batch = vectors(SIZES, seed=3)
    keys, query_keys = batch.document_keys.clone(), batch.query_keys.clone()
    query_keys[3] = query_keys[1]
    for row, other in ((0, 0), (1, 3)):
        keys[batch.documents_of(row)[1]] = keys[batch.documents_of(other)[0]]
    batch = replace(batch, document_keys=keys, query_keys=query_keys)
    check_all(ranks, [Case(config, batch, textbook(config)) for config in CASES[:-1]], only=[0, 2])


def test_mixing_changes_the_loss():
    batch = vectors(SIZES, seed=3)
    mixed, plain = (InfoNCEConfig(temperature=0.3, **options) for options in (ALL, {}))
    assert textbook(mixed)(batch, {}) > textbook(plain)(batch, {}) + 0.05


def test_draws():
    """Pairs of different hard negatives of the row, Beta(2, 2), other ones in the next batch."""
    batch = vectors([1 + i % 6 for i in range(3000)])
    info = info_of(batch)
    draws = Draws.of(info, 4, seed=1)
    starts = torch.tensor(info.rows.first_documents).unsqueeze(1)
    sizes = torch.tensor(batch.sizes).unsqueeze(1)
    exist = (sizes > 2).expand(-1, 4)
    for chosen in (draws.first, draws.second):
        assert ((chosen > starts) & (chosen < starts + sizes))[exist].all()
    assert (draws.first != draws.second)[exist].all()
    assert draws.exist.equal(sizes > 2)
    of_five = (draws.first - starts)[sizes.squeeze(1) == 6].flatten()
    counts = torch.bincount(of_five)[1:]
    assert counts.tolist() == pytest.approx([400] * 5, rel=0.25)
    assert draws.fraction.mean().item() == pytest.approx(0.5, abs=0.01)
    assert draws.fraction.var().item() == pytest.approx(0.05, abs=0.003)
    for other in (
        Draws.of(info, 4, seed=2),
        Draws.of(BatchInfo(**{**_fields(info), "origin": Origin(batch=6)}), 4, seed=1),
    ):
        assert not other.fraction.equal(draws.fraction)


def _fields(info: BatchInfo) -> dict:
    return {name: getattr(info, name) for name in ("owners", "query_keys", "document_keys", "global_rows")}
