"""A kind of model of the user's own, two vectors of each text: docs/extending.md explains this file."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import normalize

from embedtrain import evaluate, load_encoder
from embedtrain.commands import calibrate, inspect, static, verify
from embedtrain.config import kinds
from embedtrain.config.compose import compose_recipe, load_recipe
from embedtrain.config.kinds import trust_kind
from embedtrain.config.recipe import ExportConfig, LoraConfig, ModelConfig, Recipe
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.errors import ConfigError
from embedtrain.formats.model_files import ModelFiles, write_own_tokenizer
from embedtrain.formats.source import CommandModel, open_model_source, read_files, source_of, with_kind_of_files
from embedtrain.inference.exact import pairwise_dot
from embedtrain.kinds import BackboneKind
from embedtrain.kinds.dense import Dense
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.kinds.matrix_score import MatrixScore
from embedtrain.models.adapters import add_adapters
from embedtrain.models.build import assemble_encoder
from embedtrain.models.encoder import Encoder, Head, hidden_size
from embedtrain.models.pooling import PooledTokens
from embedtrain.training.inputs import check_dimensions
from tests.commands import call
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import model_options, save_small, small_model, small_tokenizer, write_beir, write_rows
from tests.test_run_losses import BASE

KIND = "tests.extending.test_kind:Halves"


@dataclass(kw_only=True)
class HalvesOptions(ModelConfig):
    kind: str = KIND  # further fields are options of `model`


class HalvesHead(Head):
    """The means of the first and of the second half of a text's tokens, beside each other: [N, 2D]."""

    def __init__(self, size):
        self.dimension, self.modules = 2 * size, {}

    def __call__(self, hidden, chunk):
        tokens = PooledTokens.of(chunk)
        numbers, weights = tokens.numbers(), tokens.weights()
        is_first = 2 * numbers <= tokens.of_tokens(tokens.max(numbers)) + 1
        states = hidden if chunk.packing is None else hidden[0]
        return (
            torch.cat([normalize(tokens.mean(states, weights * half), dim=1) for half in (is_first, ~is_first)], 1),
        )


class HalvesScore(MatrixScore):
    """The larger of the products of the first halves and of the second halves."""

    name, kind, default_temperature = "larger_product", "halves", 0.1

    def matrix(self, anchors, candidates):
        halves = zip(anchors.values.chunk(2, dim=1), candidates.values.chunk(2, dim=1), strict=True)
        return torch.maximum(*(first @ second.T for first, second in halves))

    def exact(self, first, second):
        halves = zip(first.values.chunk(2, dim=1), second.values.chunk(2, dim=1), strict=True)
        return torch.maximum(*(pairwise_dot(*half) for half in halves)).float().cpu()


class HalvesFiles(ModelFiles):
    """A model directory: the backbone as transformers writes it, and its tokenizer."""

    plural = "models of two vectors per text"
    description = "A model of two vectors of {dimension} dimensions together, for texts of up to {max_length} tokens"

    def write(self, directory, source, tokenizer):
        write_own_tokenizer(directory, tokenizer)


class Halves(BackboneKind):
    """Two vectors per text."""

    name, summary, options = KIND, "two vectors per text", HalvesOptions
    why_no_dimensions = "is for one vector, and halves has two"

    def read(self, directory, model):
        return source_of(self, read_files(directory, model))

    def new(self, source, model):
        return source

    def dimension(self, source):
        return 2 * hidden_size(source.config)

    def layout(self, source, tokenizer):
        return Layout(tokenizer)

    def head(self, source):
        return HalvesHead(hidden_size(source.config))

    def score(self, source):
        return HalvesScore()

    @property
    def files(self):
        return HalvesFiles()


def run(world, *arguments):
    return run_without_base(world, *(set(BASE) - {"model.pooling=mean", "export.check=false"}), *arguments)[0]


def test_a_kind_of_the_users_own(ranks, tmp_path):
    """Trained exactly on any number of ranks, resumed, exported, reopened, evaluated and mined with."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_rows(inputs / "train.jsonl", 26)
    write_beir(inputs / "dev", 6)
    save_small(small_model("xlm-roberta"), inputs / "model")
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    data = [f"data.train=[{inputs / 'train.jsonl'}]", f"evaluation.sets=[{inputs / 'dev'}]", "checkpoint.every=2"]
    options = [f"model.kind={KIND}", f"model.path={inputs / 'model'}", *data]
    for size, output_dir in runs.items():
        ranks(size, run, *options, f"output_dir={output_dir}")
    first, *others = (metric_rows(output_dir) for output_dir in runs.values())
    for left, right in [pair for other in others for pair in zip(first, other, strict=True)]:
        for name in ("loss", "grad_norm", "ndcg@10"):
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4)
    resumed = rewind_run(runs[1], tmp_path / "resumed", 2)
    ranks(3, run, *options, f"output_dir={resumed}")
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)

    model, sets = runs[2] / "model", [str(inputs / "dev")]
    reported = evaluate(model, sets, precision="fp32", quiet=True, kind=KIND)
    assert reported["dev"]["ndcg@10"] == pytest.approx(first[-1]["ndcg@10"], abs=1e-6)
    call("evaluate", f"model={model}", f"kind={KIND}", f"sets=[{sets[0]}]", f"output_dir={tmp_path / 'evaluated'}",
         "precision=fp32", ranks=2)  # fmt: skip
    assert metric_rows(tmp_path / "evaluated")[-1]["ndcg@10"] == reported["dev"]["ndcg@10"]
    call("mine", f"model={model}", f"kind={KIND}", f"data=[{inputs / 'train.jsonl'}]",
         f"output_dir={tmp_path / 'mined'}", "precision=fp32", "negatives=2")  # fmt: skip
    assert any((tmp_path / "mined").rglob("*.jsonl"))
    own = [f"model={model}", f"kind={KIND}"]
    assert verify.run(verify.compose([*own, "engines=[transformers]"])) == []
    inspect.run(inspect.compose([*own, f"data={inputs / 'train.jsonl'}"]))
    for command, written in ((static, []), (calibrate, [f"data={inputs / 'dev'}"])):
        with pytest.raises(ConfigError, match=f"model.*{KIND}"):
            command.run(command.compose([*own, *written, f"output_dir={tmp_path / 'out'}"]))


def test_only_the_user_names_its_code(tmp_path):
    (tmp_path / "kind.json").write_text('{"kind": "unknown:Kind"}')
    with pytest.raises(ConfigError, match=r"is a model of kind=unknown:Kind.* write kind=unknown:Kind"):
        load_encoder(tmp_path)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\nmodel: {kind: 'unknown:Kind'}\n")
    with pytest.raises(ConfigError, match=r"model\.kind=unknown:Kind: a file cannot name code"):
        compose_recipe(["--config-dir", str(tmp_path), "recipe=own", "model.path=m", "data.train=[x.jsonl]"])
    (tmp_path / "recipe.yaml").write_text("model: {kind: 'unknown:Kind', path: m}\n")
    with pytest.raises(ConfigError, match=r"model\.kind=unknown:Kind: a file cannot name code"):
        load_recipe(tmp_path / "recipe.yaml")


@dataclass(kw_only=True)
class ShoutOptions(DenseOptions):
    """Without a default of `kind`: it inherits that of dense models."""


class Shout(Dense):
    """A dense model of the user's own."""

    name, options = "shout", ShoutOptions

    def recognise(self, directory):
        return None


def test_a_kind_opens_its_models_whatever_the_default_of_its_options(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "_user_kinds", {})
    path = f"{__name__}:Shout"
    kind, directory = trust_kind(path, "kind"), save_small(small_model("bert"), tmp_path)
    model = with_kind_of_files(CommandModel(path=str(directory), kind=path, pooling="mean"))[0]
    assert model.kind == path and open_model_source(model).kind is kind
    assert kind.model_options(path=str(directory)).kind == path


def test_dimensions_that_a_kind_has_not_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "_user_kinds", {})
    directory = str(save_small(small_model("bert"), tmp_path))
    model = trust_kind(KIND, "kind").model_options(path=directory)
    source = open_model_source(model)
    for other in (source, open_model_source(model_options("sparse", path=directory))):
        other.require_dimensions([None], "truncate_dims")
        with pytest.raises(ConfigError, match=rf"truncate_dims: {other.kind.why_no_dimensions}; leave it out"):
            other.require_dimensions([5], "truncate_dims")
    recipe = Recipe(name="halves", model=model, export=ExportConfig(truncate_dim=4))
    with pytest.raises(ConfigError, match=rf"^export\.truncate_dim=4: .*{KIND}"):
        check_dimensions(recipe, source)


class ScaledHead(HalvesHead):
    """Halves that a new layer scales."""

    def __init__(self, size):
        super().__init__(size)
        self.modules = {"scale": torch.nn.Linear(size, size)}


def test_a_head_is_trained_beside_adapters():
    backbone = assemble_encoder(open_model_source(small_model("bert"))).backbone
    encoder = Encoder(backbone, ScaledHead(32))
    add_adapters(encoder, LoraConfig(rank=4), None, torch.float32)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert {"scale.weight", "scale.bias"} == {name for name in trained if "lora_" not in name}


class UpperCase(Layout):
    """Tokenizes other texts than those that it gets."""

    def tokenize(self, texts, *arguments, **options):
        return super().tokenize([text.upper() for text in texts], *arguments, **options)


def test_a_layout_of_the_users_own_has_cached_tokens_of_its_own():
    tokenizer = small_tokenizer()
    of_package, own = (TextTokenizer(tokenizer, 16, layout(tokenizer)) for layout in (Layout, UpperCase))
    assert of_package.fingerprint == of_package.layout.fast.fingerprint(*of_package.layout.identity)
    assert own.fingerprint != of_package.fingerprint
