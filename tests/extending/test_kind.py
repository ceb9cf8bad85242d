"""A kind of model of the user's own, two vectors of each text: docs/extending.md explains this file."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import normalize

from embedtrain import evaluate, load_encoder
from embedtrain.commands import calibrate, inspect, static, verify
from embedtrain.config.compose import compose_recipe, load_recipe
from embedtrain.config.recipe import ModelConfig
from embedtrain.data.tokens import Layout
from embedtrain.errors import ConfigError
from embedtrain.formats.model_files import ModelFiles, write_own_tokenizer
from embedtrain.formats.source import read_files, source_of
from embedtrain.inference.exact import pairwise_dot
from embedtrain.kinds import BackboneKind
from embedtrain.kinds.matrix_score import MatrixScore
from embedtrain.models.encoder import Head, hidden_size
from embedtrain.models.pooling import PooledTokens
from tests.commands import call
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import save_small, small_model, write_beir, write_rows
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
    runs = {size: tmp_path / str(size) for size in (1, 2, 3)}
    data = [f"data.train=[{inputs / 'train.jsonl'}]", f"evaluation.sets=[{inputs / 'dev'}]", "checkpoint.every=2"]
    options = [f"model.kind={KIND}", f"model.path={inputs / 'model'}", *data]
    for size, output_dir in runs.items():
        ranks(size, run, *options, f"output_dir={output_dir}")
    first, *others = (metric_rows(output_dir) for output_dir in runs.values())
    for left, right in [pair for other in others for pair in zip(first, other, strict=True)]:
        for name in ("loss", "grad_norm", "ndcg@10"):
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4)
    resumed = rewind_run(runs[1], tmp_path / "resumed", 2)
    ranks(2, run, *options, f"output_dir={resumed}")
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
