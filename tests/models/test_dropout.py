"""`model.dropout` replaces every dropout of the configuration, in training alone."""

import copy

import pytest
from torch import nn

from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.models.build import build_encoder
from tests.small import ARCHITECTURES, CLASSIFIERS, MORE_ARCHITECTURES, STATIC, small_model


def probabilities(module: nn.Module) -> set[float]:
    """All probabilities of dropout: of its modules, and those that attention hands to its kernel."""
    found = {part.p for part in module.modules() if isinstance(part, nn.Dropout)}
    for part in module.modules():
        found |= {value for name, value in vars(part).items() if "dropout" in name and isinstance(value, float)}
    return found


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE_ARCHITECTURES])
def test_every_dropout_is_replaced(architecture):
    source = open_model_source(small_model(architecture, dropout=0.1))
    before = copy.deepcopy(source.config.to_dict())
    assert probabilities(build_encoder(source, 0.3)) == {0.3}
    assert source.config.to_dict() == before, "the exported configuration is the original one"
    assert 0.3 not in probabilities(build_encoder(source))
    assert probabilities(build_encoder(source, 0.0)) == {0.0}


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_cross_encoder_has_it_before_its_classifier(architecture):
    source = open_model_source(small_model(architecture, kind="cross_encoder"))
    assert probabilities(build_encoder(source, 0.3)) == {0.3}


@pytest.mark.parametrize("architecture", STATIC)
def test_an_architecture_without_dropout(architecture):
    source = open_model_source(small_model(architecture))
    with pytest.raises(ConfigError, match=r"model\.dropout=0\.3: .* has no dropout"):
        build_encoder(source, 0.3)
