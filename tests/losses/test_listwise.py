"""Losses of each query's own documents equal their formulas on any number of ranks, and sentence-transformers' classes.

sentence-transformers takes means over one rank's own lists or pairs, so that its classes are compared in one process.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import sentence_transformers
import torch
from packaging.version import Version
from sentence_transformers.cross_encoder import CrossEncoder
from sentence_transformers.cross_encoder import losses as reference
from torch import Tensor

from embedtrain.config.losses import (
    ADRMSEConfig,
    BCEConfig,
    DistillScoresConfig,
    LambdaLossConfig,
    LambdaWeighting,
    ListNetConfig,
    LossConfig,
    MarginMSEConfig,
    MeanOver,
    MSEConfig,
    PListMLEConfig,
    RankNetConfig,
    Similarity,
    SoftmaxConfig,
)
from embedtrain.losses.listwise import constant_scores_warning
from tests.losses.global_batch import Case, GlobalVectors, check_all, run, run_in_chunks, scored_pairs, vectors

UNEVEN = (2, 5, 1, 3, 2, 4)


def similar(batch: GlobalVectors, row: int, document: int, similarity: Similarity) -> Tensor:
    if not len(batch.queries):
        return batch.documents[document, 0]
    query, vector = batch.queries[row], batch.documents[document]
    product = (query * vector).sum()
    return product / (query.norm() * vector.norm()) if similarity is Similarity.cosine else product


def lists(batch: GlobalVectors, config: LossConfig) -> list[tuple[list[Tensor], list[float]]]:
    """Scores, divided by the temperature, and labels of each row's documents."""
    temperature = getattr(config, "temperature", None) or 1.0
    return [
        (
            [similar(batch, row, d, config.similarity or Similarity.cosine) / temperature for d in documents],
            [float(batch.scores[d]) for d in documents],
        )
        for row in range(len(batch.sizes))
        if (documents := batch.documents_of(row))
    ]


def mean(terms: list, batch: GlobalVectors) -> Tensor:
    return sum(terms, batch.documents.sum() * 0) / max(1, len(terms))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def bce(config: BCEConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        for s, y in zip(scores, labels, strict=True):
            terms.append(-config.pos_weight * y * sigmoid(s).log() - (1 - y) * sigmoid(-s).log())
    return mean(terms, batch)


def mse(config: MSEConfig, batch: GlobalVectors) -> Tensor:
    return mean([(s - y) ** 2 for list_ in lists(batch, config) for s, y in zip(*list_, strict=True)], batch)


def softmax(config: SoftmaxConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        above = config.positive_above
        is_positive = [i == 0 if above is None else y > above for i, y in enumerate(labels)]
        positives = [s for s, yes in zip(scores, is_positive, strict=True) if yes]
        negatives = [s for s, yes in zip(scores, is_positive, strict=True) if not yes]
        if positives and negatives:
            of_positives = [-torch.log_softmax(torch.stack([s, *negatives]), dim=0)[0] for s in positives]
            terms.append(sum(of_positives) / len(of_positives))
    return mean(terms, batch)


def listnet(config: ListNetConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        if len(scores) > 1:
            target = torch.softmax(torch.tensor(labels, dtype=torch.float64), dim=0)
            terms.append(-(target * torch.log_softmax(torch.stack(scores), dim=0)).sum())
    return mean(terms, batch)


def plistmle(config: PListMLEConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        n = len(scores)
        if n > 1:
            ordered = torch.stack([scores[i] for i in sorted(range(n), key=lambda i: -labels[i])])
            weights = [2 ** (n - k) - 1 for k in range(1, n + 1)]
            weights = [w / sum(weights) for w in weights] if config.position_weights else [1.0] * n
            terms.append(-sum(w * torch.log_softmax(ordered[k:], dim=0)[0] for k, w in enumerate(weights)))
    return mean(terms, batch)


def adr_mse(config: ADRMSEConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        if len(scores) > 1:
            errors = []
            for i, (s, y) in enumerate(zip(scores, labels, strict=True)):
                equal = [r for r, label in enumerate(sorted(labels, reverse=True), 1) if label == y]
                rank = sum(equal) / len(equal)
                approximate = 1 + sum(sigmoid(other - s) for j, other in enumerate(scores) if j != i)
                errors.append((rank - approximate) ** 2 / math.log2(rank + 1))
            terms.append(sum(errors) / len(errors))
    return mean(terms, batch)


def pair_terms(config: RankNetConfig | LambdaLossConfig, scores: list[Tensor], labels: list[float]) -> list[Tensor]:
    n = len(scores)
    by_score = sorted(range(n), key=lambda i: -scores[i].item())
    rank = {document: index for index, document in enumerate(by_score, 1)}
    top_k = getattr(config, "top_k", None) or n
    ideal = sum((2**y - 1) / math.log2(1 + k) for k, y in enumerate(sorted(labels, reverse=True)[:top_k], 1))
    terms = []
    for i, j in itertools.product(range(n), range(n)):
        if labels[i] <= labels[j] or min(rank[i], rank[j]) > top_k:
            continue
        weight = 1.0
        if isinstance(config, LambdaLossConfig):
            k = abs(rank[i] - rank[j])
            gains = abs((2 ** labels[i] - 1) - (2 ** labels[j] - 1)) / ideal
            ndcg_loss2 = abs(1 / math.log2(1 + k) - 1 / math.log2(2 + k)) * gains
            lambdarank = abs(1 / math.log2(1 + rank[i]) - 1 / math.log2(1 + rank[j])) * gains
            weight = {
                LambdaWeighting.lambdarank: lambdarank,
                LambdaWeighting.ndcg_loss2: ndcg_loss2,
                LambdaWeighting.ndcg_loss2pp: config.mu * ndcg_loss2 + lambdarank,
            }[config.weighting]
        terms.append(weight * torch.log(1 + torch.exp(scores[j] - scores[i])))
    return terms


def of_pairs(config: RankNetConfig | LambdaLossConfig, batch: GlobalVectors) -> Tensor:
    terms = [of_list for list_ in lists(batch, config) if (of_list := pair_terms(config, *list_))]
    if config.mean_over is MeanOver.pairs:
        return mean([term for of_list in terms for term in of_list], batch)
    return mean([sum(of_list) / len(of_list) for of_list in terms], batch)


def distill_scores(config: DistillScoresConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        if len(scores) > 1:
            target = torch.softmax(torch.tensor(labels, dtype=torch.float64) / config.teacher_temperature, dim=0)
            terms.append((target * (target.log() - torch.log_softmax(torch.stack(scores), dim=0))).sum())
    return mean(terms, batch)


def margin_mse(config: MarginMSEConfig, batch: GlobalVectors) -> Tensor:
    terms = []
    for scores, labels in lists(batch, config):
        for s, y in zip(scores[1:], labels[1:], strict=True):
            terms.append(((scores[0] - s) - (labels[0] - y)) ** 2)
    return mean(terms, batch)


FORMULAS = {
    DistillScoresConfig: distill_scores,
    MarginMSEConfig: margin_mse,
    BCEConfig: bce,
    MSEConfig: mse,
    SoftmaxConfig: softmax,
    ListNetConfig: listnet,
    PListMLEConfig: plistmle,
    ADRMSEConfig: adr_mse,
    RankNetConfig: of_pairs,
    LambdaLossConfig: of_pairs,
}
CONFIGS = {
    "bce": BCEConfig(pos_weight=2.5),
    "distill_scores": DistillScoresConfig(temperature=0.7, teacher_temperature=2.0),
    "distill_scores, default temperature": DistillScoresConfig(),
    "margin_mse": MarginMSEConfig(),
    "mse": MSEConfig(),
    "softmax": SoftmaxConfig(temperature=0.7),
    "softmax, several positives": SoftmaxConfig(positive_above=1.5),
    "listnet": ListNetConfig(temperature=0.7),
    "plistmle": PListMLEConfig(),
    "listmle": PListMLEConfig(position_weights=False, temperature=2.0),
    "adr_mse": ADRMSEConfig(temperature=0.5),
    "ranknet": RankNetConfig(temperature=0.5),
    "ranknet, pairs": RankNetConfig(mean_over=MeanOver.pairs),
    "lambdaloss": LambdaLossConfig(mu=3.0),
    "lambdaloss, top 2": LambdaLossConfig(top_k=2, mean_over=MeanOver.pairs),
    "lambdarank": LambdaLossConfig(weighting=LambdaWeighting.lambdarank),
    "ndcg_loss2": LambdaLossConfig(weighting=LambdaWeighting.ndcg_loss2, top_k=1),
}


def textbook(config: LossConfig):
    return lambda batch, _: FORMULAS[type(config)](config, batch)


def fitting(config: LossConfig, batch: GlobalVectors) -> GlobalVectors:
    """The batch with labels that the loss accepts."""
    return replace(batch, scores=batch.scores / 4) if isinstance(config, BCEConfig) else batch


def cases(names: Iterable[str], batch: GlobalVectors, **options: Any) -> list[Case]:
    configs = [replace(CONFIGS[name], **options) for name in names]
    return [Case(config, fitting(config, batch), textbook(config)) for config in configs]


def test_scores_of_a_cross_encoder(ranks):
    check_all(ranks, cases(CONFIGS, scored_pairs(UNEVEN)), fp32=3e-5)


@pytest.mark.parametrize("similarity", Similarity)
def test_vectors_of_a_dense_model(ranks, similarity):
    batch = replace(vectors(UNEVEN, normalised=False), scores=scored_pairs(UNEVEN).scores)
    names = ["bce", "mse", "softmax", "listnet", "plistmle", "adr_mse", "ranknet", "lambdaloss"]
    check_all(ranks, cases(names, batch, similarity=similarity), fp32=3e-5, only=[0, 6])


def test_few_documents_and_equal_scores(ranks):
    """Lists of one document, lists of equal labels, and a model that gives every document the same score."""
    for sizes in ((1, 1, 1), (3,)):
        check_all(ranks, cases(CONFIGS, scored_pairs(sizes)), fp32=3e-5, only=[0, 5])
    batch = scored_pairs(UNEVEN)
    check_all(ranks, cases(CONFIGS, replace(batch, scores=torch.ones_like(batch.scores))), fp32=3e-5, only=[2])
    check_all(ranks, cases(CONFIGS, replace(batch, documents=0 * batch.documents)), fp32=3e-5, only=[2])


@pytest.mark.parametrize("name", ["softmax", "listnet", "plistmle", "listmle", "adr_mse", "ranknet", "lambdaloss"])
def test_a_list_alone_equals_the_list_in_a_batch(ranks, name):
    """The length of other lists changes neither its loss nor its gradient."""
    sizes = (2, 9, 3)
    batch, config = scored_pairs(sizes, seed=3), CONFIGS[name]
    (combined,) = ranks(1, run, config, batch, [[0, 1, 2]], torch.float64, 1)
    alone = [ranks(1, run, config, batch, [[row]], torch.float64, 1)[0] for row in range(3)]
    assert combined["local_loss"] == pytest.approx(sum(answer["local_loss"] for answer in alone) / 3)
    torch.testing.assert_close(combined["documents"], torch.cat([answer["documents"] for answer in alone]) / 3)


def test_position_weights_of_three_documents(ranks):
    """(0.75, 0.25, 0): the gradient at the last document's score is that of its place in the two normalisers."""
    batch = replace(scored_pairs((3,)), scores=torch.tensor([2.0, 1.0, 0.0]), documents=torch.zeros(3, 1).double())
    (answer,) = ranks(1, run, PListMLEConfig(), batch, [[0]], torch.float64, 1)
    assert answer["local_loss"] == pytest.approx(0.75 * math.log(3) + 0.25 * math.log(2))
    expected = [0.75 * (1 / 3 - 1), 0.75 / 3 + 0.25 * (1 / 2 - 1), 0.75 / 3 + 0.25 / 2]
    assert answer["documents"].flatten().tolist() == pytest.approx(expected)


def test_long_lists_and_large_scores(ranks):
    """No overflow of weights, exponentials or gains, and finite gradients, in float32."""
    for config in CONFIGS.values():
        batch = scored_pairs((300, 2))
        batch = fitting(config, replace(batch, documents=1e4 * batch.documents))
        (answer,) = ranks(1, run, config, batch, [[0, 1]], torch.float32, 1)
        assert math.isfinite(answer["local_loss"]), config
        assert answer["documents"].isfinite().all(), config


@pytest.mark.parametrize("name", ["ranknet", "lambdaloss", "adr_mse"])
def test_pairs_in_chunks(ranks, name):
    """One document's pairs at a time give the same as all at once."""
    batch = scored_pairs(UNEVEN)
    for whole, chunked in ranks(2, run_in_chunks, CONFIGS[name], batch, [[0, 1, 2], [3, 4, 5]]):
        assert chunked["local_loss"] == pytest.approx(whole["local_loss"], rel=1e-12)
        torch.testing.assert_close(chunked["documents"], whole["documents"], rtol=1e-12, atol=1e-12)


def test_metrics(ranks):
    """Two lists: scores 3, 1, 2 of labels 1, 1, 0, and 0, 4 of labels 1, 0; and one document, which has no range."""
    batch = replace(
        scored_pairs((3, 2, 1)),
        documents=torch.tensor([[3.0], [1.0], [2.0], [0.0], [4.0], [-7.0]]).double(),
        scores=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]).double(),
    )
    expected = {
        "bce": {"accuracy": 2 / 6, "score_range": 3.0},
        "softmax": {"accuracy": 1 / 2, "score_range": 3.0},
        "ranknet": {"agreement": 1 / 4, "score_range": 3.0},
        "ranknet, pairs": {"agreement": 1 / 3, "score_range": 3.0},
        "plistmle": {"score_range": 3.0},
    }
    for name, metrics in expected.items():
        answers = ranks(2, run, CONFIGS[name], batch, [[0], [1, 2]], torch.float64, 1)
        summed = {key: sum(answer["metrics"][key] for answer in answers) for key in answers[0]["metrics"]}
        assert summed == pytest.approx(metrics), name
    collapsed = replace(batch, documents=torch.full_like(batch.documents, 0.25))
    (answer,) = ranks(1, run, SoftmaxConfig(), collapsed, [[0, 1, 2]], torch.float32, 1)
    assert answer["metrics"]["score_range"] == 0.0
    assert "score_range=0" in str(constant_scores_warning(answer["metrics"]))
    assert constant_scores_warning({"score_range": 1e-9}) is None
    assert constant_scores_warning({"accuracy": 0.0}) is None
    (answer,) = ranks(1, run, ListNetConfig(), scored_pairs((1, 1)), [[0, 1]], torch.float32, 1)
    assert answer["metrics"] == {}, "lists of one document have no range"


class ScoreTable(CrossEncoder):
    """A cross-encoder whose texts are the numbers of their scores."""

    num_labels = 1
    device = torch.device("cpu")

    def __init__(self, scores: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.table = torch.nn.Parameter(scores.detach().clone())

    def preprocess(self, pairs, **_) -> dict[str, Tensor]:
        return {"numbers": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self.table[features["numbers"]].unsqueeze(1)}


def columns(batch: GlobalVectors) -> tuple[list, list[Tensor]]:
    """Queries and lists of documents, and labels of each list."""
    documents = [[str(d) for d in batch.documents_of(row)] for row in range(len(batch.sizes))]
    labels = [batch.scores[batch.documents_of(row)].float() for row in range(len(batch.sizes))]
    return [["query"] * len(documents), documents], labels


# Ours, theirs, its arguments, and the factor between the two. Lists have at least two documents and labels that differ,
# since theirs counts the others as 0 in the mean.
PAIRS = MeanOver.pairs
SAME = {
    "ListNet": (ListNetConfig(), reference.ListNetLoss, {}, 1.0),
    "ListMLE": (PListMLEConfig(position_weights=False), reference.ListMLELoss, {"respect_input_order": False}, 1.0),
    "PListMLE": (PListMLEConfig(), reference.PListMLELoss, {"respect_input_order": False}, 1.0),
    # Theirs takes binary logarithms by default.
    "RankNet": (RankNetConfig(mean_over=PAIRS), reference.RankNetLoss, {}, 1 / math.log(2)),
    "RankNet, top 2": (LambdaLossConfig(mean_over=PAIRS, top_k=2), reference.LambdaLoss, {"k": 2}, 1 / math.log(2)),
    "LambdaLoss": (LambdaLossConfig(mean_over=PAIRS, temperature=0.5), reference.LambdaLoss, {"sigma": 2.0}, 1.4426950),
    "LambdaRank": (
        LambdaLossConfig(mean_over=PAIRS, weighting=LambdaWeighting.lambdarank),
        reference.LambdaLoss,
        {"weighting_scheme": reference.LambdaRankScheme(), "reduction_log": "natural"},
        1.0,
    ),
    "NDCGLoss2": (
        LambdaLossConfig(mean_over=PAIRS, weighting=LambdaWeighting.ndcg_loss2),
        reference.LambdaLoss,
        {"weighting_scheme": reference.NDCGLoss2Scheme(), "reduction_log": "natural"},
        1.0,
    ),
    "ADRMSE": (ADRMSEConfig(temperature=0.5), reference.ADRMSELoss, {"alpha": 2.0}, 1.0),
}


@pytest.mark.parametrize("name", SAME)
def test_equals_sentence_transformers(ranks, name):
    if name in ("PListMLE", "RankNet, top 2") and Version(sentence_transformers.__version__) < Version("6.2"):
        pytest.skip("before 6.2, positions are counted from 0, and a pair needs both documents in the top k")
    config, theirs, arguments, factor = SAME[name]
    # ADRMSELoss is a mean over documents, so lists have the same length. Ties are in no defined order in p-ListMLE.
    sizes = (4, 4, 4) if name == "ADRMSE" else (4, 2, 3)
    batch = scored_pairs(sizes, seed=1)
    if "MLE" in name:
        batch = replace(batch, scores=torch.tensor([3.0, 1, 0, 2, 1, 2, 0, 3, 1], dtype=torch.float64))
    model = ScoreTable(batch.documents[:, 0].float())
    expected = theirs(model, **arguments)(*columns(batch))
    expected.backward()
    (answer,) = ranks(1, run, config, batch, [[0, 1, 2]], torch.float64, 1)
    assert factor * answer["local_loss"] == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(factor * answer["documents"][:, 0].float(), model.table.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "theirs", "arguments"),
    [
        (BCEConfig(), reference.BinaryCrossEntropyLoss, {}),
        (BCEConfig(pos_weight=3.0), reference.BinaryCrossEntropyLoss, {"pos_weight": torch.tensor(3.0)}),
        (MSEConfig(), reference.MSELoss, {}),
    ],
    ids=["bce", "bce, pos_weight", "mse"],
)
def test_equals_sentence_transformers_on_pairs(ranks, config, theirs, arguments):
    batch = fitting(config, scored_pairs((3, 1, 2)))
    model = ScoreTable(batch.documents[:, 0].float())
    pairs = [["query"] * 6, [str(number) for number in range(6)]]
    expected = theirs(model, **arguments)(pairs, batch.scores)
    expected.backward()
    (answer,) = ranks(1, run, config, batch, [[0, 1, 2]], torch.float64, 1)
    assert answer["local_loss"] == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(answer["documents"][:, 0].float(), model.table.grad, rtol=1e-4, atol=1e-6)
