"""Every rule of a loss's options: what breaks it, and the sentence, which names the option and what is allowed."""

import pytest

from embedtrain.config.loss_checks import check_loss, guide_paths
from embedtrain.config.losses import (
    LOSSES,
    BatchTripletConfig,
    CombinedConfig,
    ContrastiveConfig,
    CoSENTConfig,
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    Hardness,
    InfoNCEConfig,
    LossConfig,
    LossDirection,
    MarginMSEConfig,
    OrthogonalConfig,
    PartitionMode,
    SentenceTransformersConfig,
    SigLIPConfig,
    TripletConfig,
)
from embedtrain.config.row_requirements import ScoreRequirement, row_requirements
from embedtrain.errors import ConfigError

ALL_SIDES = list(LossDirection)


def parts(*losses: LossConfig, **options) -> CombinedConfig:
    return CombinedConfig(losses=list(losses), **options)


BROKEN: list[tuple[LossConfig, str]] = [
    (InfoNCEConfig(name="cosent"), r"loss\.name=cosent: .*write loss=cosent"),
    (InfoNCEConfig(name="infonc"), r"loss\.name=infonc: there is no such loss, did you mean infonce\?"),
    (InfoNCEConfig(weight=0.5), r"loss\.weight=0\.5: .*loss=combined"),
    (InfoNCEConfig(temperature=0.0), r"loss\.temperature=0\.0: must be above 0"),
    (InfoNCEConfig(temperature=float("nan")), r"loss\.temperature=nan"),
    (CoSENTConfig(temperature=-1.0), r"loss\.temperature=-1\.0"),
    (DistillScoresConfig(teacher_temperature=0.0), r"loss\.teacher_temperature=0\.0"),
    (InfoNCEConfig(temperature_bounds=[0.5, 0.1]), r"loss\.temperature_bounds=\[0\.5,0\.1\]: "),
    (InfoNCEConfig(learn_temperature=True, temperature=2.0), r"loss\.temperature=2\.0: .*\[0\.01,1\.0\]"),
    (SigLIPConfig(temperature_bounds=[0.2, 0.5]), r"loss\.temperature=0\.1: .*\[0\.2,0\.5\]"),
    (SigLIPConfig(bias=float("inf")), r"loss\.bias=inf"),
    (InfoNCEConfig(directions=[]), r"loss\.directions=\[\]: .*query_document"),
    (InfoNCEConfig(directions=[LossDirection.query_query]), r"loss\.directions=\[query_query\]"),
    (
        InfoNCEConfig(directions=[*ALL_SIDES, LossDirection.query_query]),
        r"loss\.directions=\[query_document,.*query_query\]: .*each once",
    ),
    (
        InfoNCEConfig(directions=ALL_SIDES, partition_mode=PartitionMode.separate),
        r"partition_mode=separate: .* query_query alone",
    ),
    (InfoNCEConfig(directions=ALL_SIDES, in_batch_negatives=False), r"in_batch_negatives=false leaves only"),
    (
        InfoNCEConfig(in_batch_negatives=False, hardness=Hardness.in_batch, hardness_strength=1.0),
        r"hardness=in_batch: there are none",
    ),
    (InfoNCEConfig(hardness=Hardness.all), r"hardness=all, hardness_strength=0\.0: one has no effect"),
    (InfoNCEConfig(hardness_strength=1.0), r"hardness=none, hardness_strength=1\.0"),
    (InfoNCEConfig(margin=-0.1), r"margin=-0\.1.*must not be negative"),
    (InfoNCEConfig(false_negative_margin=float("inf")), r"false_negative_margin=inf: must be a number"),
    (InfoNCEConfig(guide_margin=0.1), r"guide_margin=0\.1 has no effect without loss\.guide"),
    (InfoNCEConfig(matryoshka_dims=[]), r"matryoshka_dims=\[\]: different numbers from 1 on"),
    (InfoNCEConfig(matryoshka_dims=[8, 8]), r"matryoshka_dims=\[8, 8\]"),
    (InfoNCEConfig(matryoshka_dims=[8, 0]), r"matryoshka_dims=\[8, 0\]"),
    (InfoNCEConfig(matryoshka_weights=[1.0]), r"matryoshka_weights=\[1\.0\]: one weight for each"),
    (InfoNCEConfig(matryoshka_dims=[8], matryoshka_weights=[0.0]), r"matryoshka_weights=\[0\.0\]: must be above 0"),
    (ContrastiveConfig(margin=0.0), r"loss\.margin=0\.0: must be above 0"),
    (TripletConfig(margin=-1.0), r"loss\.margin=-1\.0"),
    (OrthogonalConfig(mean_weight=0.0, second_moment_weight=0.0), r"one of them above 0"),
    (DistillEmbeddingsConfig(project=True, matryoshka_dims=[8]), r"project=true: a projection takes all dimensions"),
    (CombinedConfig(), r"loss\.losses is empty"),
    (parts(parts(InfoNCEConfig())), r"losses\[0\]: a combination within a combination"),
    (parts(InfoNCEConfig(), InfoNCEConfig(temperature=0.0)), r"loss\.losses\[1\]\.temperature=0\.0"),
    (parts(InfoNCEConfig(weight=0.0)), r"losses\[0\]\.weight=0\.0: must be above 0"),
    (parts(InfoNCEConfig(), BatchTripletConfig()), r"batch_triplet takes rows of one text .* infonce rows of a query"),
    (
        parts(*(SentenceTransformersConfig(class_name=name) for name in ("BatchHardTripletLoss", "CoSENTLoss"))),
        r"BatchHardTripletLoss takes rows of one text .* CoSENTLoss rows of a query",
    ),
    (parts(DistillEmbeddingsConfig(), MarginMSEConfig()), r"vectors for distill_embeddings .* give .* a `teacher`"),
    (
        parts(DistillEmbeddingsConfig(teacher="a", project=True), matryoshka_dims=[8]),
        r"losses\[0\]\.project=true: a projection takes all dimensions",
    ),
    (parts(InfoNCEConfig(matryoshka_dims=[8]), matryoshka_dims=[8]), r"losses\[0\]\.matryoshka_dims"),
    (SentenceTransformersConfig(), r"loss\.class_name is missing"),
    (parts(SentenceTransformersConfig(class_name="CoSENT")), r"loss\.losses\[0\]\.class_name=CoSENT.*CoSENTLoss"),
]


@pytest.mark.parametrize(("loss", "sentence"), BROKEN, ids=[sentence for _, sentence in BROKEN])
def test_what_cannot_work_is_one_sentence(loss, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        check_loss(loss)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", LOSSES)
def test_defaults_work(name):
    wanted = {"combined": {"losses": [InfoNCEConfig()]}, "sentence_transformers": {"class_name": "CoSENTLoss"}}
    check_loss(LOSSES[name](**wanted.get(name, {})))


def test_what_a_combination_needs_is_what_all_its_parts_need():
    needs = row_requirements(parts(InfoNCEConfig(), MarginMSEConfig(), OrthogonalConfig()))
    assert (needs.documents, needs.negatives, needs.scores) == (True, True, ScoreRequirement.teacher)
    assert needs.loss == "infonce + margin_mse + orthogonal"
    assert not row_requirements(parts(OrthogonalConfig(), BatchTripletConfig())).documents


def test_guides():
    loss = parts(InfoNCEConfig(guide="a"), DistillEmbeddingsConfig(teacher="b"), InfoNCEConfig(guide="a"))
    assert guide_paths(loss) == ["a", "b"]
    assert guide_paths(InfoNCEConfig()) == guide_paths(CoSENTConfig()) == []
