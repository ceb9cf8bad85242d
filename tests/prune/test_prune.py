"""A pruned model computes what transformers computes after the same layers are taken out of the whole model."""

from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from embedtrain.commands.prune import LayerSelection, compose, select_layers
from embedtrain.commands.prune import compose as compose_prune
from embedtrain.commands.prune import run as main
from embedtrain.errors import ConfigError
from tests.small import save_guide, small_model

TEXTS = ["alpha", "beta gamma delta", "the quick brown fox " * 3]
LISTS = {"bert": "encoder.layer", "modernbert": "layers", "qwen2": "layers"}


def save_deep(folder: Path, name: str) -> Path:
    """A sentence-transformers directory with seven layers."""
    model = small_model(name)
    assert model.config is not None
    model.config["num_hidden_layers"] = 7
    return save_guide(model, folder)


def whole_without_layers(directory: Path, name: str, kept: list[int]) -> torch.Tensor:
    model = SentenceTransformer(str(directory), device="cpu")
    backbone = model[0].auto_model
    parent, _, attribute = LISTS[name].rpartition(".")
    owner = backbone.get_submodule(parent)
    layers = getattr(owner, attribute)
    setattr(owner, attribute, nn.ModuleList([layers[index] for index in kept]))
    backbone.config.num_hidden_layers = len(kept)
    return torch.from_numpy(model.encode(TEXTS))


@pytest.mark.quick("bert-options0-kept0", "modernbert-options2-kept2")
@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("bert", ["keep=3"], [0, 3, 6]),
        ("bert", ["keep=2", "select=last"], [5, 6]),
        ("modernbert", ["keep=4"], [0, 2, 4, 6]),
        ("qwen2", ["layers=[0,1,5]"], [0, 1, 5]),
    ],
)
def test_outputs_equal_those_of_the_kept_layers(tmp_path, name, options, kept, capsys):
    directory = save_deep(tmp_path / "whole", name)
    small = tmp_path / "small"
    assert main(compose([f"model={directory}", f"output_dir={small}", *options])) == small
    assert f"keeping {len(kept)} layers of 7: {', '.join(map(str, kept))}" in capsys.readouterr().out
    pruned = SentenceTransformer(str(small), device="cpu")
    vectors = torch.from_numpy(pruned.encode(TEXTS))
    torch.testing.assert_close(vectors, whole_without_layers(directory, name, kept), atol=1e-5, rtol=0)
    assert pruned[0].auto_model.config.num_hidden_layers == len(kept)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()].count("small") == 1


@pytest.mark.parametrize(
    ("keep", "select", "kinds", "kept"),
    [
        (6, "even", "f" * 12, [0, 2, 4, 7, 9, 11]),
        (3, "first", "f" * 12, [0, 1, 2]),
        (3, "last", "f" * 12, [9, 10, 11]),
        (6, "even", "fssfssfssfss", [0, 2, 4, 6, 8, 11]),
        (1, "last", "ff", [1]),
    ],
)
def test_layers_are_selected_with_their_kinds(keep, select, kinds, kept):
    selected = select_layers(keep, LayerSelection(select), kinds)
    assert selected == kept
    assert [kinds[layer] for layer in selected] == list(kinds[:keep])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["keep=7"], r"keep=7: the model has 7 layers"),
        (["layers=[0,7]"], r"layers=\[0,7\]: the model has 7 layers, the last is 6"),
        (["layers=[0,1,2,3,4,5,6]"], r"layers=\[0,1,2,3,4,5,6\]: these are all layers"),
    ],
)
def test_layers_that_cannot_be_kept_are_named(tmp_path, options, message):
    directory = save_deep(tmp_path / "whole", "bert")
    with pytest.raises(ConfigError, match=message):
        main(compose([f"model={directory}", f"output_dir={tmp_path}/small", *options]))
    assert not (tmp_path / "small").exists()


def test_a_head_that_the_model_lacks_is_not_exported(tmp_path):
    directory = save_deep(tmp_path / "whole", "bert")
    with pytest.raises(ConfigError, match=r"kind=late_interaction: .* without the projection"):
        main(compose([f"model={directory}", f"output_dir={tmp_path}/small", "keep=3", "kind=late_interaction"]))
    assert not (tmp_path / "small").exists()


def test_layers_of_another_kind_are_named(tmp_path):
    directory = save_deep(tmp_path / "whole", "modernbert")
    with pytest.raises(ConfigError, match=r"layers=\[0,3\]: layer 3 .* modernbert"):
        main(compose([f"model={directory}", f"output_dir={tmp_path}/small", "layers=[0,3]"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"keep=None and layers=None"),
        (["keep=2", "layers=[0]"], r"keep=2 and layers=\[0\]"),
        (["layers=[3,1]"], r"layers=\[3,1\]: must be ascending"),
        (["layers=[0,1]", "select=last"], r"select=last: has no effect"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        compose_prune(["model=here", "output_dir=there", *options])
