"""Every loss that a kind of model cannot be trained with is rejected, with its name and what to write instead."""

import inspect

import pytest

from embedtrain.config import loss_checks
from embedtrain.config.checks import check_recipe
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import check_kind_loss
from embedtrain.config.losses import (
    LOSSES,
    SCORE_LOSSES,
    BCEConfig,
    CombinedConfig,
    DistillScoresConfig,
    InfoNCEConfig,
    LossDirection,
    M3LossConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    RankNetConfig,
    SigLIPConfig,
    Similarity,
    XTRConfig,
)
from embedtrain.config.recipe import DataConfig, Recipe, TrainConfig, TrainSource
from embedtrain.errors import ConfigError
from tests.config.failing_checks import all_checks, failed_check
from tests.small import model_options

BOTH = [LossDirection.query_document, LossDirection.document_query]
LATE = "late_interaction"
ALLOWED = {
    "dense": set(LOSSES) - {"xtr", "m3"},
    "cross_encoder": {*SCORE_LOSSES, "custom", "combined"},
    "m3": {*SCORE_LOSSES, "m3", "custom", "combined"},
    "sparse": {*SCORE_LOSSES, "infonce", "combined"},
    "late_interaction": {*SCORE_LOSSES, "infonce", "xtr", "custom", "combined"},
}
CASES = [
    (M3LossConfig(), "dense", r"loss=m3: .*loss=infonce.*model\.kind=m3"),
    (InfoNCEConfig(), "m3", r"loss=infonce: .*loss=m3"),
    (M3LossConfig(matryoshka=MatryoshkaConfig(layers=[1])), "m3", r"loss\.matryoshka\.layers=\[1\]: .*m3"),
    (M3LossConfig(matryoshka=MatryoshkaConfig(dims=[4])), "m3", r"loss\.matryoshka\.dims=\[4\]: "),
    # Parts of a combination: on a score, the first dimension of a vector is the whole vector.
    (
        CombinedConfig(losses=[BCEConfig(), RankNetConfig(matryoshka=MatryoshkaConfig(dims=[1]))]),
        "cross_encoder",
        r"loss\.losses\[1\]\.matryoshka\.dims=\[1\]: .*cross_encoder",
    ),
    (
        CombinedConfig(losses=[BCEConfig()], matryoshka=MatryoshkaConfig(dims=[1])),
        "cross_encoder",
        r"loss\.matryoshka\.dims=\[1\]: ",
    ),
    (
        CombinedConfig(losses=[M3LossConfig()], matryoshka=MatryoshkaConfig(dims=[4])),
        "m3",
        r"loss\.matryoshka\.dims=\[4\]: ",
    ),
    (
        CombinedConfig(losses=[InfoNCEConfig(), MarginMSEConfig(matryoshka=MatryoshkaConfig(layers=[1]))]),
        LATE,
        r"loss\.losses\[1\]\.matryoshka\.layers=\[1\]: ",
    ),
    (RankNetConfig(similarity=Similarity.dot), "cross_encoder", r"loss\.similarity=dot: .*score itself"),
    (DistillScoresConfig(similarity=Similarity.dot), "m3", r"loss\.similarity=dot: .*three scores"),
    (SigLIPConfig(), "sparse", r"loss=siglip: .*loss=infonce"),
    (SigLIPConfig(temperature_bounds=[0.2, 0.5]), "dense", r"loss\.temperature=null: is the default 0\.1 .*0\.2,0\.5"),
    (InfoNCEConfig(similarity=Similarity.dot), "sparse", r"loss\.similarity=dot: "),
    (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[4])), "sparse", r"loss\.matryoshka\.dims=\[4\]: "),
    (InfoNCEConfig(mixed_list=True), "sparse", r"loss\.mixed_list=true: .*sparse"),
    (
        InfoNCEConfig(matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.int8])),
        "late_interaction",
        r"loss\.matryoshka\.precisions: .*dense",
    ),
    (XTRConfig(), "dense", r"loss=xtr: .*loss=infonce.*model\.kind=late_interaction"),
    (InfoNCEConfig(), "cross_encoder", r"loss=infonce: .*loss=softmax"),
    (SigLIPConfig(), LATE, r"loss=siglip: .*write one of infonce, xtr, bce, "),
    (
        CombinedConfig(losses=[InfoNCEConfig(), SigLIPConfig()]),
        LATE,
        r"loss=combined: losses\[1\]\.name=siglip: .*write one of infonce",
    ),
    (InfoNCEConfig(directions=BOTH), LATE, r"loss\.directions=\[query_document,document_query\]: .*\[query_document\]"),
    (InfoNCEConfig(similarity=Similarity.dot), LATE, r"loss\.similarity=dot: .*model\.similarity"),
    (RankNetConfig(similarity=Similarity.dot), LATE, r"loss\.similarity=dot: "),
    (MarginMSEConfig(similarity=Similarity.cosine), LATE, r"loss\.similarity=cosine: "),
    (
        CombinedConfig(losses=[DistillScoresConfig(), InfoNCEConfig(directions=BOTH)]),
        LATE,
        r"loss\.losses\[1\]\.directions=",
    ),
    (
        InfoNCEConfig(learn_temperature=True, temperature=2.0),
        "dense",
        r"loss\.temperature=2\.0: .*\[0\.01,1\.0\]",
    ),
    (
        InfoNCEConfig(learn_temperature=True, temperature_bounds=[0.1, 0.5]),
        "dense",
        r"loss\.temperature=null: .* 0\.05 .*\[0\.1,0\.5\]",
    ),
    (InfoNCEConfig(learn_temperature=True, temperature=40.0), LATE, r"loss\.temperature=40\.0: .*\[0\.01,32\.0\]"),
]


@pytest.mark.parametrize(("loss", "kind", "pattern"), CASES, ids=[pattern for *_, pattern in CASES])
def test_a_rejected_loss_is_named(loss, kind, pattern):
    with pytest.raises(ConfigError, match=f"^{pattern}") as caught:
        check_kind_loss(loss, load_kind(kind))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ALLOWED)
def test_the_losses_of_a_kind(kind):
    for name, options in LOSSES.items():
        if name in ALLOWED[kind]:
            check_kind_loss(options(), load_kind(kind))
        else:
            with pytest.raises(ConfigError, match=rf"^loss={name}: "):
                check_kind_loss(options(), load_kind(kind))


def test_options_of_late_interaction():
    check_kind_loss(InfoNCEConfig(learn_temperature=True, temperature=2.0), load_kind(LATE))
    check_kind_loss(InfoNCEConfig(learn_temperature=True, temperature_bounds=[0.1, 0.5]), load_kind(LATE))
    check_kind_loss(CombinedConfig(losses=[InfoNCEConfig(), DistillScoresConfig()]), load_kind(LATE))


def test_the_losses_of_sources_are_checked():
    recipe = Recipe(
        name="t",
        model=model_options(path="dir"),
        data=DataConfig(train=[TrainSource(path="a"), TrainSource(path="b", loss=XTRConfig())]),
        train=TrainConfig(steps=1),
    )
    with pytest.raises(ConfigError, match=r"^data\.train\[1\]\.loss=xtr: "):
        check_recipe(recipe)
    recipe.model, recipe.loss = model_options("cross_encoder", path="dir"), RankNetConfig()
    recipe.data.train[1].loss = CombinedConfig(losses=[BCEConfig(matryoshka=MatryoshkaConfig(dims=[1]))])
    with pytest.raises(ConfigError, match=r"^data\.train\[1\]\.loss\.losses\[0\]\.matryoshka\.dims=\[1\]: "):
        check_recipe(recipe)


def test_every_check_has_a_case():
    reached = set()
    for loss, kind, _ in CASES:
        with pytest.raises(ConfigError) as caught:
            check_kind_loss(loss, load_kind(kind))
        reached.add(failed_check(caught.value, loss_checks))
    # At the end of the file; those before have cases in test_loss_checks.py and test_sentence_transformers.py.
    first = inspect.getsourcelines(loss_checks.check_kind_loss)[1]
    assert {(path, line) for path, line in all_checks(loss_checks) if line >= first} - reached == set()
