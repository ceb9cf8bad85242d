"""Distillation losses equal their formulas on any number of ranks, and sentence-transformers' classes."""

import itertools
from dataclasses import replace

import pytest
import torch
from sentence_transformers import losses
from sentence_transformers.util import pairwise_cos_sim, pairwise_dot_score
from torch import Tensor

from embedtrain.config.losses import (
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    EmbeddingDistance,
    MarginMSEConfig,
    MatryoshkaConfig,
    Similarity,
    TeacherMap,
)
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import FROM_ROWS, Guide
from tests.losses.global_batch import Case, GlobalVectors, check, check_all, run, vectors
from tests.losses.reference_loss import assert_equals_reference

UNEVEN = (2, 5, 1, 3, 2, 4)
PAIRWISE = {Similarity.cosine: pairwise_cos_sim, Similarity.dot: pairwise_dot_score}


def scored(sizes: tuple[int, ...] = UNEVEN) -> GlobalVectors:
    """Rows with a teacher's scores of their documents, between 0 and 5; vectors not of length 1."""
    batch = vectors(sizes, scores=True, normalised=False)
    return replace(batch, scores=(5 * batch.scores).float().double())


def similar(a: Tensor, b: Tensor, similarity: Similarity) -> Tensor:
    return (a * b).sum() / (a.norm() * b.norm() if similarity is Similarity.cosine else 1)


def of_rows(batch: GlobalVectors, similarity: Similarity) -> list[tuple[Tensor, Tensor]]:
    """The scores of each row, by the student and by the teacher."""
    return [
        (
            torch.stack([similar(batch.queries[row], batch.documents[p], similarity) for p in indices]),
            batch.scores[indices],
        )
        for row in range(len(batch.sizes))
        if (indices := batch.documents_of(row))
    ]


def divergence(config: DistillScoresConfig):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = []
        for student, teacher in of_rows(batch, config.similarity or Similarity.cosine):
            if len(student) > 1:
                p = torch.softmax(teacher / config.teacher_temperature, dim=0)
                q = torch.softmax(student / config.temperature, dim=0)
                factor = config.temperature**2 if config.times_squared_temperature else 1.0
                terms.append((p * (p / q).log()).sum() * factor)
        return sum(terms, batch.queries.sum() * 0) / max(1, len(terms))

    return textbook


DISTILL_SCORES = [
    DistillScoresConfig(temperature=1.0, times_squared_temperature=True),
    DistillScoresConfig(temperature=0.2, teacher_temperature=3.0, times_squared_temperature=True),
    DistillScoresConfig(temperature=2.0, similarity=Similarity.dot, times_squared_temperature=True),
]


@pytest.mark.parametrize("config", DISTILL_SCORES, ids=["cosine", "temperatures", "dot"])
def test_distill_scores(ranks, config):
    check(ranks, config, scored(), divergence(config))


def test_the_default_temperature_of_vectors(ranks):
    """That of a cross-encoder's scores is tested in test_listwise.py."""
    expected = divergence(DistillScoresConfig(temperature=0.05))
    check(ranks, DistillScoresConfig(), scored((3, 2, 1)), expected, only=[0])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3,), (1,)], ids=["single documents", "one row", "one document"])
def test_distill_few_scores(ranks, sizes):
    config = DistillScoresConfig(temperature=0.2, teacher_temperature=2.0)
    check(ranks, config, scored(sizes), divergence(config), only=[0, 2, 5])


@pytest.mark.parametrize("config", DISTILL_SCORES, ids=["cosine", "temperatures", "dot"])
def test_distill_scores_equals_sentence_transformers(ranks, config):
    batch = scored((3,) * 5)
    assert_equals_reference(
        ranks,
        config,
        batch,
        losses.DistillKLDivLoss,
        batch.scores.view(5, 3),
        similarity_fct=PAIRWISE[config.similarity or Similarity.cosine],
        temperature=config.temperature,
        teacher_temperature=config.teacher_temperature,
    )


def test_large_score_differences(ranks):
    """Differences of thousands of the student or the teacher, and equal scores, give neither overflow nor NaN."""
    batch = scored()
    batch = replace(batch, queries=100 * batch.queries, documents=100 * batch.documents, scores=1e4 * batch.scores)
    config = DistillScoresConfig(temperature=1.0, similarity=Similarity.dot)
    for answer in ranks(2, run, config, batch, [[0, 1, 2], [3, 4, 5]], torch.float32, 8):
        assert torch.tensor(answer["local_loss"]).isfinite()
        assert answer["queries"].isfinite().all()
    equal = replace(scored(), scores=torch.ones(sum(UNEVEN), dtype=torch.float64))
    equal = replace(equal, documents=equal.documents[:1].expand(sum(UNEVEN), 8).contiguous())
    check(ranks, config, equal, divergence(config), only=[0, 2])


def margins(config: MarginMSEConfig):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = []
        for student, teacher in of_rows(batch, config.similarity or Similarity.cosine):
            terms += list(((student[0] - student[1:]) - (teacher[0] - teacher[1:])) ** 2)
        return sum(terms, batch.queries.sum() * 0) / max(1, len(terms))

    return textbook


@pytest.mark.parametrize("similarity", Similarity)
def test_margin_mse(ranks, similarity):
    config = MarginMSEConfig(similarity=similarity)
    check(ranks, config, scored(), margins(config), only=[0, 2, 5, 7])
    check(ranks, config, scored((1, 1)), margins(config), only=[0, 1, 5])
    for size in (2, 4):
        batch = scored((size,) * 5)
        theirs = losses.MarginMSELoss
        assert_equals_reference(
            ranks, config, batch, theirs, batch.scores.view(5, size), similarity_fct=PAIRWISE[similarity]
        )


def test_agreement(ranks):
    """Documents at cosines 1, 0 and -1 to the query, in three rows that the teacher ranks differently."""
    east = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    row = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    batch = replace(
        vectors((3, 3, 3, 1)),
        queries=east.repeat(4, 1),
        documents=torch.cat([row.repeat(3, 1), east]),
        scores=torch.tensor([3.0, 2, 1, 3, 1, 2, 2, 3, 1, 5], dtype=torch.float64),
    )
    for config, expected in ((DistillScoresConfig(), 2 / 3), (MarginMSEConfig(), 5 / 6)):
        answers = ranks(2, run, config, batch, [[0], [1, 2, 3]], torch.float64, 2)
        assert sum(answer["metrics"]["agreement"] for answer in answers) == pytest.approx(expected)


def with_teacher(name: str, sizes: tuple[int, ...] = (2, 1, 3, 0, 2), *, width: int) -> GlobalVectors:
    """Rows whose texts also have a teacher's vectors of `width` dimensions."""
    batch, other = vectors(sizes, normalised=False), vectors(sizes, seed=1, dimension=width)
    return replace(batch, guides={name: Guide(other.queries.float().double(), other.documents.float().double())})


def followed(config: DistillEmbeddingsConfig):
    def textbook(batch: GlobalVectors, parameters: dict[str, Tensor]) -> Tensor:
        guide = batch.guides[config.teacher or FROM_ROWS]
        pairs = [*zip(batch.queries, guide.queries, strict=True), *zip(batch.documents, guide.documents, strict=True)]
        terms = []
        for vector, teacher in pairs:
            student = vector
            if config.project:
                student = parameters["projection.weight"] @ vector + parameters["projection.bias"]
            match config.distance:
                case EmbeddingDistance.cosine:
                    terms.append(1 - student @ teacher / (student.norm() * teacher.norm()))
                case EmbeddingDistance.mse:
                    terms.append(((student - teacher) ** 2).mean())
                case EmbeddingDistance.l2:
                    terms.append(((student - teacher) ** 2).sum().sqrt())
        return sum(terms) / len(terms)

    return textbook


@pytest.mark.quick("some/teacher-False-cosine", "None-False-l2", "some/teacher-True-mse", "some/teacher-True-l2")
@pytest.mark.parametrize("distance", EmbeddingDistance)
@pytest.mark.parametrize(("teacher", "project"), [(None, False), ("some/teacher", False), ("some/teacher", True)])
def test_distill_embeddings(ranks, distance, teacher, project):
    config = DistillEmbeddingsConfig(distance=distance, teacher=teacher, project=project)
    name = FROM_ROWS if teacher is None else teacher
    check(ranks, config, with_teacher(name, width=11 if project else 8), followed(config), only=[0, 2, 4, 7])
    # Rows of one text.
    alone = with_teacher(name, (0, 0, 0), width=11 if project else 8)
    check(ranks, config, alone, followed(config), only=[0, 2, 5])


@pytest.mark.parametrize("distance", EmbeddingDistance)
def test_distill_embeddings_equals_sentence_transformers(ranks, distance):
    batch = with_teacher(FROM_ROWS, (2,) * 4, width=8)
    guide = batch.guides[FROM_ROWS]
    labels = torch.cat([guide.queries.unsqueeze(1), guide.documents.view(4, 2, 8)], dim=1)
    config = DistillEmbeddingsConfig(distance=distance)
    assert_equals_reference(ranks, config, batch, losses.EmbedDistillLoss, labels, distance_metric=distance.value)
    if distance is EmbeddingDistance.mse:
        # MSELoss is older and takes one vector for all columns.
        one = replace(
            batch, guides={FROM_ROWS: Guide(guide.queries, guide.queries.repeat_interleave(2, dim=0).contiguous())}
        )
        assert_equals_reference(ranks, config, one, losses.MSELoss, guide.queries)


def test_vectors_equal_to_the_teachers_have_loss_zero(ranks):
    batch = vectors((1, 1))
    batch = replace(batch, guides={FROM_ROWS: Guide(batch.queries, batch.documents)})
    for distance, dims in itertools.product(EmbeddingDistance, (None, [8, 4])):
        config = DistillEmbeddingsConfig(distance=distance, matryoshka=MatryoshkaConfig(dims=dims))
        (answer,) = ranks(1, run, config, batch, [[0, 1]], torch.float64, 8)
        assert answer["local_loss"] == pytest.approx(0.0, abs=1e-12)
        if dims is None:  # otherwise the vectors are normalised again, and the gradient of a length does not vanish
            assert answer["queries"].abs().max() < 1e-12


def rejection(world: World, batch: GlobalVectors) -> str:
    """With a dimension unknown in advance, as of vectors in the rows."""
    loss = build_loss(DistillEmbeddingsConfig(), dimension=8, seed=0)
    with pytest.raises(ConfigError) as error:
        loss(*batch.of_rank([0, 1], torch.float32))
    return str(error.value)


def test_different_dimensions_need_a_projection(ranks):
    config = DistillEmbeddingsConfig(teacher="some/teacher")
    with pytest.raises(ConfigError, match=r"loss\.teacher=some/teacher has 11 dimensions .* 8 ?.*loss\.project=true"):
        build_loss(config, dimension=8, guide_dimensions={"some/teacher": 11}, seed=0)
    (message,) = ranks(1, rejection, with_teacher(FROM_ROWS, (1, 1), width=11))
    assert "11 dimensions" in message
    assert "loss.project=true" in message
    with pytest.raises(ConfigError, match=r"loss\.project=true"):
        build_loss(DistillEmbeddingsConfig(project=True), dimension=8, seed=0)
    narrow = DistillEmbeddingsConfig(teacher="some/teacher", teacher_map=TeacherMap.truncate)
    with pytest.raises(ConfigError, match=r"loss\.teacher_map=truncate: .* 5 dimensions.* 8"):
        build_loss(narrow, dimension=8, guide_dimensions={"some/teacher": 5}, seed=0)


MAPPED = [
    DistillEmbeddingsConfig(teacher="some/teacher", teacher_map=TeacherMap.truncate, distance=EmbeddingDistance.mse),
    DistillEmbeddingsConfig(teacher="some/teacher", teacher_map=TeacherMap.orthogonal),
    DistillEmbeddingsConfig(teachers=["some/teacher", "other"], teacher_weights=[1.0, 3.0], project=True),
]


def test_teachers_of_other_dimensions(ranks):
    """Mapped to the model's dimensions; several teachers, whose cosines are averaged."""
    batch = with_teacher("some/teacher", width=11)
    batch = replace(batch, guides={**batch.guides, **with_teacher("other", width=9).guides})

    def followed_by(config: DistillEmbeddingsConfig):
        def map_to_student(vectors: Tensor) -> Tensor:
            if config.teacher_map is TeacherMap.truncate:
                return vectors[:, :8]
            loss = build_loss(config, dimension=8, guide_dimensions={"some/teacher": 11}, seed=0)
            matrix = dict(loss.named_buffers())["teacher_projection"].double()
            torch.testing.assert_close(matrix.T @ matrix, torch.eye(8, dtype=torch.float64), atol=1e-6, rtol=0)
            return vectors @ matrix

        def concatenated(parts: list[Tensor]) -> Tensor:
            first, second = (part / part.norm(dim=1, keepdim=True) for part in parts)
            return torch.cat([first * 0.5, second * 0.75**0.5], dim=1)

        def textbook(batch: GlobalVectors, parameters: dict[str, Tensor]) -> Tensor:
            guides = [batch.guides[config.teacher]] if config.teacher else list(batch.guides.values())
            if config.teachers:
                guide = Guide(
                    concatenated([guide.queries for guide in guides]),
                    concatenated([guide.documents for guide in guides]),
                )
            else:
                guide = Guide(map_to_student(guides[0].queries), map_to_student(guides[0].documents))
            one = replace(config, teacher="one", teachers=None)
            return followed(one)(replace(batch, guides={"one": guide}), parameters)

        return textbook

    check_all(ranks, [Case(config, batch, followed_by(config)) for config in MAPPED], only=[0, 6])


def test_projection_is_a_function_of_the_seed():
    def make(seed: int) -> Tensor:
        config = DistillEmbeddingsConfig(project=True)
        return build_loss(config, dimension=8, guide_dimensions={FROM_ROWS: 11}, seed=seed).projection.weight

    assert torch.equal(make(3), make(3))
    assert not torch.equal(make(3), make(4))
    assert make(3).shape == (11, 8)
