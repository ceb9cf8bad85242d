"""The loss of each source: the recipe's, with the options that the source overrides."""

from typing import Any

import pytest

from embedtrain.config.compose import compose_recipes, load_recipe, to_plain
from embedtrain.config.losses import CombinedConfig, CoSENTConfig, InfoNCEConfig, LossConfig, SigLIPConfig
from embedtrain.config.recipe import BatchMode, DataConfig, Recipe, TrainSource
from embedtrain.config.source_losses import distinct_losses, source_loss, uses_batches_by_source
from embedtrain.errors import ConfigError


def composed(train: str, *arguments: str) -> Recipe:
    return compose_recipes(["recipe=bce_xlmr", f"data.train={train}", *arguments])[0]


def losses(train: str, *arguments: str) -> list[LossConfig]:
    recipe = composed(train, *arguments)
    return [source_loss(source, recipe.loss) for source in recipe.data.train]


def test_a_source_overrides_single_options():
    source_losses = losses(
        "[a,{path: b,loss: {margin: 0.1}},{path: c,loss: {temperature: 0.5}},{path: d,in_batch_negatives: false},"
        "{path: e,loss: cosent},{path: f,loss: {name: cosent,temperature: 0.1}},"
        "{path: g,loss: {name: cosent,temperature: 2}}]",
        "loss.temperature=0.03",
    )
    assert source_losses == [
        InfoNCEConfig(temperature=0.03),
        InfoNCEConfig(temperature=0.03, margin=0.1),
        InfoNCEConfig(temperature=0.5),
        InfoNCEConfig(temperature=0.03, in_batch_negatives=False),
        CoSENTConfig(),
        CoSENTConfig(temperature=0.1),
        CoSENTConfig(temperature=2.0),
    ]


def test_a_source_overrides_the_parts_of_a_combination():
    parts = "loss.losses=[{name: infonce, temperature: 0.05}, {name: orthogonal, weight: 0.5}]"
    (loss,) = losses(
        "[{path: a,loss: {losses: [{name: infonce, temperature: 0.1}, {name: orthogonal, weight: 0.5}]}}]",
        "loss=combined",
        parts,
    )
    assert isinstance(loss, CombinedConfig)
    assert [getattr(part, "temperature", None) for part in loss.losses] == [0.1, None]
    (other,) = losses("[{path: a,loss: {name: combined, losses: [{name: infonce}]}}]")
    assert isinstance(other, CombinedConfig)
    assert other.losses == [InfoNCEConfig()]


@pytest.mark.parametrize(
    ("train", "arguments", "message"),
    [
        (
            "[{path: a,loss: cosents}]",
            (),
            "data.train[0].loss.name=cosents: there is no such loss, did you mean cosent",
        ),
        ("[b,{path: a,loss: {marg: 1}}]", (), "data.train[1].loss: unknown option marg"),
        ("[{path: a,loss: 3}]", (), "neither the name of a loss nor a mapping"),
        ("[{path: a,loss: {temperature: 0}}]", (), "data.train, a: loss.temperature=0.0: "),
        ("[{path: a,loss: {name: cosine_mse,temperature: 1}}]", (), "data.train[0].loss: unknown option temperature"),
        ("[{path: a,loss: siglip,in_batch_negatives: false}]", (), "loss=siglip has no such option"),
        ("[{path: a,loss: cosent},b]", ("data.batches=mixed",), "data.batches=mixed: "),
        ("[a,b]", ("data.mixed_share=0.1",), "data.mixed_share=0.1: is a part of batches by source"),
        ("[a,b]", ("data.mixed_share=1", "data.batches=by_source"), "data.mixed_share=1.0: must be"),
        (
            "[{path: a,loss: cosent},b]",
            ("data.mixed_share=0.1", "data.batches=by_source"),
            "data.mixed_share=0.1: sources set their own loss",
        ),
        (
            "[{path: a,in_batch_negatives: false}]",
            ("loss.directions=[query_document,query_query]",),
            "data.train, a: loss.directions=[query_document,query_query]: ",
        ),
    ],
)
def test_a_rejected_option_is_named_with_its_source(train, arguments, message):
    with pytest.raises(ConfigError) as caught:
        composed(train, *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_batches_by_source():
    same, other = [InfoNCEConfig(), InfoNCEConfig()], [InfoNCEConfig(), InfoNCEConfig(temperature=1.0)]
    assert not uses_batches_by_source(DataConfig(batches=BatchMode.auto), same)
    assert not uses_batches_by_source(DataConfig(batches=BatchMode.mixed), same)
    assert uses_batches_by_source(DataConfig(batches=BatchMode.by_source), same)
    assert uses_batches_by_source(DataConfig(batches=BatchMode.auto), other)
    assert distinct_losses([*other, *same]) == ([InfoNCEConfig(), InfoNCEConfig(temperature=1.0)], [0, 1, 0, 0])


def test_losses_without_in_batch_negatives_accept_the_option():
    source = TrainSource(path="a", in_batch_negatives=False)
    assert source_loss(source, CoSENTConfig()) == CoSENTConfig()
    with pytest.raises(ConfigError, match="siglip"):
        source_loss(source, SigLIPConfig())


def test_losses_of_sources_are_saved_and_loaded(tmp_path):
    import yaml

    recipe = composed("[a,{path: b,loss: cosent},{path: c,loss: {temperature: 0.5}}]")
    path = tmp_path / "recipe.yaml"
    plain: Any = to_plain(recipe)
    path.write_text(yaml.safe_dump(plain))
    assert to_plain(load_recipe(path)) == plain
