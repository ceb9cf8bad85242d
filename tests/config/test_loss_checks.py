"""Every check of a loss: options that it rejects, and that the message names option and value."""

import inspect

import pytest

from embedtrain.config import loss_checks
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.loss_checks import check_loss, guide_paths
from embedtrain.config.losses import (
    LOSSES,
    BatchTripletConfig,
    BCEConfig,
    CandidateSet,
    CombinedConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CustomConfig,
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    DistillSimilaritiesConfig,
    Divergence,
    Hardness,
    Implementation,
    InfoNCEConfig,
    LambdaLossConfig,
    LayerWeighting,
    ListNetConfig,
    LossConfig,
    LossDirection,
    M3LossConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    MatryoshkaWeighting,
    OnMissing,
    OrthogonalConfig,
    PartitionMode,
    PrecisionSides,
    SentenceTransformersConfig,
    SigLIPConfig,
    Similarity,
    SimilarityMSEConfig,
    SoftmaxConfig,
    TeacherMap,
    TripletConfig,
    XTRConfig,
)
from embedtrain.config.row_requirements import ScoreRequirement
from embedtrain.errors import ConfigError
from tests.config.failing_checks import all_checks, failed_check

ALL_DIRECTIONS = list(LossDirection)


def parts(*losses: LossConfig, **options) -> CombinedConfig:
    return CombinedConfig(losses=list(losses), **options)


CASES: list[tuple[LossConfig, str]] = [
    (InfoNCEConfig(name="cosent"), r"loss\.name=cosent: .*write loss=cosent"),
    (InfoNCEConfig(name="infonc"), r"loss\.name=infonc: there is no such loss, did you mean infonce\?"),
    (InfoNCEConfig(weight=0.5), r"loss\.weight=0\.5: .*loss=combined"),
    (InfoNCEConfig(temperature=0.0), r"loss\.temperature=0\.0: "),
    (InfoNCEConfig(temperature=float("nan")), r"loss\.temperature=nan"),
    (CoSENTConfig(temperature=-1.0), r"loss\.temperature=-1\.0"),
    (BCEConfig(pos_weight=0.0), r"loss\.pos_weight=0\.0"),
    (ListNetConfig(temperature=0.0), r"loss\.temperature=0\.0"),
    (LambdaLossConfig(mu=-1.0), r"loss\.mu=-1\.0"),
    (LambdaLossConfig(top_k=0), r"loss\.top_k=0"),
    (SoftmaxConfig(positive_above=float("nan")), r"loss\.positive_above=nan"),
    (DistillScoresConfig(teacher_temperature=0.0), r"loss\.teacher_temperature=0\.0"),
    (InfoNCEConfig(temperature_bounds=[0.5, 0.1]), r"loss\.temperature_bounds=\[0\.5,0\.1\]: "),
    (XTRConfig(learn_temperature=True, temperature=2.0), r"loss\.temperature=2\.0: .*\[0\.01,1\.0\]"),
    (XTRConfig(top_k=0), r"loss\.top_k=0: "),
    (SigLIPConfig(temperature=0.1, temperature_bounds=[0.2, 0.5]), r"loss\.temperature=0\.1: .*\[0\.2,0\.5\]"),
    (CustomConfig(path="my_losses"), r"loss\.path=my_losses"),
    (CustomConfig(path="a:B", kwargs=[1]), r"loss\.kwargs=\[1\]"),
    (CustomConfig(path="a:B", label=True, scores=True), r"loss\.label=true"),
    (DistillSimilaritiesConfig(teachers=["a"]), r"loss\.teachers=\[a\]: .*teacher=PATH"),
    (SimilarityMSEConfig(teacher="a", teachers=["b", "c"]), r"loss\.teacher=a: .*teachers"),
    (
        DistillEmbeddingsConfig(teachers=["b", "c"], teacher_weights=[1.0]),
        r"loss\.teacher_weights=\[1\.0\]: .*each of teachers",
    ),
    (DistillEmbeddingsConfig(on_missing=OnMissing.encode), r"loss\.on_missing=encode: .*loss\.teacher"),
    (
        DistillEmbeddingsConfig(project=True, teacher_map=TeacherMap.truncate),
        r"loss\.teacher_map=truncate: project=true",
    ),
    (
        DistillEmbeddingsConfig(teachers=["b", "c"], teacher_map=TeacherMap.pca),
        r"loss\.teacher_map=pca: .*one teacher",
    ),
    (DistillSimilaritiesConfig(directions=[]), r"loss\.directions=\[\]"),
    (DistillSimilaritiesConfig(teacher_temperature=0.0), r"loss\.teacher_temperature=0\.0"),
    (
        DistillSimilaritiesConfig(candidates=CandidateSet.row, directions=[LossDirection.query_query]),
        r"loss\.directions=\[query_query\]: .*candidates=row",
    ),
    (
        DistillSimilaritiesConfig(candidates=CandidateSet.row, implementation=Implementation.ring),
        r"loss\.implementation=ring: .*candidates=row",
    ),
    (
        DistillSimilaritiesConfig(divergence=Divergence.mse, temperature=0.1),
        r"loss\.temperature=0\.1: .*divergence=mse",
    ),
    (SigLIPConfig(bias=float("inf")), r"loss\.bias=inf"),
    (InfoNCEConfig(directions=[]), r"loss\.directions=\[\]: .*query_document"),
    (InfoNCEConfig(directions=[LossDirection.query_query]), r"loss\.directions=\[query_query\]"),
    (
        InfoNCEConfig(directions=[*ALL_DIRECTIONS, LossDirection.query_query]),
        r"loss\.directions=\[query_document,.*query_query\]: .*each once",
    ),
    (
        InfoNCEConfig(directions=ALL_DIRECTIONS, partition_mode=PartitionMode.separate),
        r"loss\.partition_mode=separate: .*query_query.*partition_mode=joint",
    ),
    (
        InfoNCEConfig(directions=ALL_DIRECTIONS, in_batch_negatives=False),
        r"directions=\[.*\]: .*in_batch_negatives",
    ),
    (
        InfoNCEConfig(in_batch_negatives=False, hardness=Hardness.in_batch, hardness_strength=1.0),
        r"loss\.hardness=in_batch: .*in_batch_negatives=false",
    ),
    (InfoNCEConfig(hardness_strength=-1.0, hardness=Hardness.all), r"loss\.hardness_strength=-1\.0: "),
    (InfoNCEConfig(focal=-0.5), r"loss\.focal=-0\.5: "),
    (InfoNCEConfig(hardness=Hardness.all), r"loss\.hardness=all: .*hardness_strength=0\.0"),
    (InfoNCEConfig(hardness_strength=1.0), r"loss\.hardness=none: .*hardness_strength=1\.0"),
    (InfoNCEConfig(guide="x", guide_margin=float("nan")), r"loss\.guide_margin=nan: "),
    (InfoNCEConfig(margin=-0.1), r"loss\.margin=-0\.1: "),
    (InfoNCEConfig(false_negative_margin=float("inf")), r"false_negative_margin=inf: "),
    (InfoNCEConfig(guide_margin=0.1), r"loss\.guide_margin=0\.1: .*guide"),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[])), r"matryoshka\.dims=\[\]: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8, 8])), r"matryoshka\.dims=\[8,8\]: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8, 0])), r"matryoshka\.dims=\[8,0\]: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dim_weights=[1.0])), r"matryoshka\.dim_weights=\[1\.0\]: .*dims=null"),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8], dim_weights=[0.0])), r"matryoshka\.dim_weights=\[0\.0\]: "),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(dim_weighting=MatryoshkaWeighting.sqrt)),
        r"matryoshka\.dim_weighting=sqrt: .*dims",
    ),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8], dim_weights=[1.0], dim_weighting=MatryoshkaWeighting.sqrt)),
        r"matryoshka\.dim_weighting=sqrt: .*dim_weights",
    ),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8, 4], dims_per_step=3)),
        r"matryoshka\.dims_per_step=3: .*dims=\[8,4\]",
    ),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8, 4], dims_per_step=1)), r"matryoshka\.dims_per_step=1: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims_per_step=2)), r"matryoshka\.dims_per_step=2: .*dims=null"),
    (InfoNCEConfig(mixed_pairs=-1), r"mixed_pairs=-1: "),
    (InfoNCEConfig(mixed_pairs=1, similarity=Similarity.dot), r"similarity=.*dot.*: .*write cosine"),
    (
        InfoNCEConfig(mixed_list=True, directions=ALL_DIRECTIONS[:2], partition_mode=PartitionMode.separate),
        r"partition_mode=.*separate.*: .*write joint",
    ),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[])), r"loss\.matryoshka\.precisions=\[\]: "),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.uint8])),
        r"precisions=.*uint8.*: .*write int8",
    ),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precision_weights=[1.0])),
        r"precision_weights=\[1\.0\]: .*precisions=null",
    ),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.int8], precision_weights=[0.0])),
        r"precision_weights=\[0\.0\]: ",
    ),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(precision_warmup=1.5)), r"precision_warmup=1\.5: "),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precision_sides=PrecisionSides.documents)),
        r"precision_sides=.*documents.*: .*int8 or binary",
    ),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.int8], precision_warmup=0.1)),
        r"precision_warmup=0\.1: .*add float",
    ),
    (
        BatchTripletConfig(
            matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.int8], precision_sides=PrecisionSides.documents)
        ),
        r"precision_sides=.*documents.*: loss=batch_triplet",
    ),
    (
        parts(InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.float]))),
        r"losses\[0\]\.matryoshka\.precisions=.*write loss\.matryoshka\.precisions",
    ),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[])), r"matryoshka\.layers=\[\]: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[3, 0])), r"matryoshka\.layers=\[3,0\]: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layer_weights=[1.0])), r"layer_weights=\[1\.0\]: .*layers=null"),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layer_weighting=LayerWeighting.log)), r"layer_weighting=log: .*layers"),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[3], layers_per_step=2)), r"layers_per_step=2: .*layers=\[3\]"),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.int8], precisions_per_step=2)),
        r"precisions_per_step=2: .*precisions=\[.*int8.*\]",
    ),
    (
        parts(
            InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[3])),
            matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.float]),
        ),
        r"precisions=.*float.*: .*a part has layers",
    ),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layer_kl=1.0)), r"layer_kl=1\.0: .*without layers"),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[3], layer_kl=-1.0)), r"layer_kl=-1\.0: "),
    (BatchTripletConfig(matryoshka=MatryoshkaConfig(layers=[3], layer_kl=1.0)), r"layer_kl=1\.0: .*batch_triplet"),
    (
        parts(InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[3])), matryoshka=MatryoshkaConfig(layers=[3])),
        r"losses\[0\]\.matryoshka\.layers",
    ),
    (ContrastiveConfig(margin=0.0), r"loss\.margin=0\.0: "),
    (TripletConfig(margin=-1.0), r"loss\.margin=-1\.0"),
    (OrthogonalConfig(mean_weight=-1.0), r"loss\.mean_weight=-1\.0: "),
    (OrthogonalConfig(second_moment_weight=-1.0), r"loss\.second_moment_weight=-1\.0: "),
    (OrthogonalConfig(mean_weight=0.0, second_moment_weight=0.0), r"loss\.mean_weight=0\.0: .*second_moment_weight"),
    (
        DistillEmbeddingsConfig(project=True, matryoshka=MatryoshkaConfig(dims=[8])),
        r"loss\.project=true: .*matryoshka\.dims",
    ),
    (M3LossConfig(loss_weights=[1.0, 1.0]), r"loss\.loss_weights=\[1\.0,1\.0\]: must be 4 weights"),
    (M3LossConfig(teacher_temperature=2.0), r"loss\.teacher_temperature=2\.0: .*kd_loss_type=none"),
    (M3LossConfig(self_distillation_start_step=-1), r"loss\.self_distillation_start_step=-1: "),
    (
        M3LossConfig(self_distillation=False, self_distillation_start_step=5),
        r"loss\.self_distillation_start_step=5: .*self_distillation",
    ),
    (CombinedConfig(), r"loss\.losses=\[\]: "),
    (parts(parts(InfoNCEConfig())), r"losses\[0\]\.name=combined: "),
    (parts(InfoNCEConfig(), InfoNCEConfig(temperature=0.0)), r"loss\.losses\[1\]\.temperature=0\.0"),
    (parts(InfoNCEConfig(weight=0.0)), r"losses\[0\]\.weight=0\.0: "),
    (parts(InfoNCEConfig(), BatchTripletConfig()), r"loss\.losses: batch_triplet .* infonce "),
    (
        parts(*(SentenceTransformersConfig(class_name=name) for name in ("BatchHardTripletLoss", "CoSENTLoss"))),
        r"loss\.losses: BatchHardTripletLoss .* CoSENTLoss ",
    ),
    (
        parts(DistillEmbeddingsConfig(), MarginMSEConfig()),
        r"losses: .*distill_embeddings .*margin_mse.* `teacher`",
    ),
    (
        parts(DistillEmbeddingsConfig(teacher="a", project=True), matryoshka=MatryoshkaConfig(dims=[8])),
        r"losses\[0\]\.project=true: ",
    ),
    (
        parts(InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8])), matryoshka=MatryoshkaConfig(dims=[8])),
        r"losses\[0\]\.matryoshka\.dims",
    ),
    (SentenceTransformersConfig(), r"loss\.class_name "),
    (parts(SentenceTransformersConfig(class_name="CoSENT")), r"loss\.losses\[0\]\.class_name=CoSENT.*CoSENTLoss"),
]


@pytest.mark.parametrize(("loss", "pattern"), CASES, ids=[pattern for _, pattern in CASES])
def test_a_rejected_option_is_named_with_its_value(loss, pattern):
    with pytest.raises(ConfigError, match=pattern) as caught:
        check_loss(loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_defaults_pass(name):
    expected = {
        "combined": {"losses": [InfoNCEConfig()]},
        "custom": {"path": "my_losses:MyLoss"},
        "sentence_transformers": {"class_name": "CoSENTLoss"},
    }
    check_loss(LOSSES[name](**expected.get(name, {})))


def test_a_combination_requires_what_its_parts_require():
    needs = parts(InfoNCEConfig(), MarginMSEConfig(), OrthogonalConfig()).row_requirements
    assert (needs.documents, needs.negatives, needs.scores) == (True, True, ScoreRequirement.teacher)
    assert needs.loss == "infonce + margin_mse + orthogonal"
    assert not parts(OrthogonalConfig(), BatchTripletConfig()).row_requirements.documents


def test_guides_are_listed_once():
    loss = parts(InfoNCEConfig(guide="a"), DistillEmbeddingsConfig(teacher="b"), InfoNCEConfig(guide="a"))
    assert guide_paths(loss) == ["a", "b"]
    assert guide_paths(InfoNCEConfig()) == guide_paths(CoSENTConfig()) == []


def test_every_check_has_a_case():
    reached = set()
    for loss, _ in CASES:
        with pytest.raises(ConfigError) as caught:
            check_loss(loss)
        reached.add(failed_check(caught.value, loss_checks))
    # Those of loss=sentence_transformers, at the end of the file, have cases in test_sentence_transformers.py.
    first_of_them = inspect.getsourcelines(loss_checks.check_sentence_transformers)[1]
    checks = {(path, line) for path, line in all_checks(loss_checks) if line < first_of_them}
    assert checks - reached == set()
