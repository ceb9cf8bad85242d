"""A pooling mode with weights, attention over the tokens of a text: docs/extending.md explains the class."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel

from embedtrain import evaluate, load_encoder
from embedtrain.commands import calibrate, inspect, search, verify
from embedtrain.config import code
from embedtrain.errors import ConfigError
from embedtrain.formats.serving import SERVING_ENGINES, ServedModel
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.dense.files import DenseFiles
from embedtrain.models.build import full_state_dict
from embedtrain.models.pooling import PooledTokens
from tests.runs import losses, metric_rows, options, run
from tests.small import add_own_pooling, model_options, save_guide, small_model, small_tokenizer, text

POOLING = "tests.extending.test_pooling:AttentionPooling"
TEXTS = [text(seed, length) for seed, length in enumerate((1, 9, 4))]


class AttentionPooling(nn.Module):
    """The mean of the tokens, with weights by a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.score = nn.Linear(size, 1)

    def forward(self, hidden: Tensor, tokens: PooledTokens) -> Tensor:
        """Hidden states of tokens to a vector of each text, [N, size]."""
        weights = tokens.softmax(self.score(hidden).float())
        return tokens.sum(hidden.float() * weights)


def test_commands_open_a_directory_with_the_class_that_the_user_names(tmp_path, capsys):
    model = add_own_pooling(save_guide(small_model("bert"), tmp_path), POOLING)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"_id": str(number), "text": text}) + "\n" for number, text in enumerate(TEXTS))
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": TEXTS[0], "positive": TEXTS[1]}) + "\n")
    options, calibrated = [f"model={model}", f"pooling={POOLING}"], tmp_path / "calibrated"
    search.run(search.compose([*options, f"corpus={corpus}", f"query={TEXTS[1]}", "top_k=1"]))
    assert "1.000  1" in capsys.readouterr().out
    written = ["head=mean", f"data={corpus}", f"output_dir={calibrated}"]
    calibrate.run(calibrate.compose([*options, *written]))
    vectors = [
        torch.as_tensor(load_encoder(path, pooling=AttentionPooling, normalize=False).encode(TEXTS))
        for path in (model, calibrated)
    ]
    torch.testing.assert_close(vectors[0] - vectors[0].mean(dim=0), vectors[1], atol=1e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match=rf"pooling=mean: .*{POOLING}; leave it out"):
        calibrate.run(calibrate.compose([f"model={model}", "pooling=mean", *written]))
    assert verify.run(verify.compose([*options, "engines=[transformers]"])) == []
    inspect.run(inspect.compose([*options, f"data={corpus.with_name('rows.jsonl')}"]))
    assert "length in tokens" in capsys.readouterr().out


def test_another_kind_takes_the_backbone_without_the_pooling(tmp_path):
    model = add_own_pooling(save_guide(small_model("bert"), tmp_path), POOLING)
    source = open_model_source(model_options("cross_encoder", path=str(model)))
    assert "backbone.embeddings.word_embeddings.weight" in full_state_dict(source, seed=0)


class Elsewhere(AttentionPooling):
    """The same class by another path."""


class FirstToken(nn.Module):
    """A pooling without weights."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, tokens: PooledTokens) -> Tensor:
        """Hidden states of tokens to a vector of each text, [N, size]."""
        return tokens.first(hidden).float()


def test_a_pooling_whose_weights_are_not_in_the_files_is_not_random(tmp_path):
    plain = save_guide(small_model("bert"), tmp_path)
    with pytest.raises(ConfigError, match=rf"pooling={POOLING}: .* has no weights of this class"):
        load_encoder(plain, pooling=AttentionPooling)
    vectors = [load_encoder(plain, pooling=pooling).encode(TEXTS) for pooling in (FirstToken, "cls")]
    assert (vectors[0] == vectors[1]).all()
    model = add_own_pooling(plain, POOLING)
    with pytest.raises(ConfigError, match=rf"pooling=.*:Elsewhere: .*write pooling={POOLING}"):
        load_encoder(model, pooling=Elsewhere)


def test_the_card_names_the_class_and_no_engine_serves_it(tmp_path):
    model = add_own_pooling(save_guide(small_model("bert"), tmp_path), POOLING)
    usage = "\n".join(DenseFiles().usage("me/model", {}, model))
    assert "from tests.extending.test_pooling import AttentionPooling" in usage
    assert 'load_encoder("me/model", pooling=AttentionPooling)' in usage and "SentenceTransformer" not in usage
    served = ServedModel.open(model, open_model_source(model_options(path=str(model), pooling=POOLING)))
    assert all(engine.reasons_against(served) for engine in SERVING_ENGINES.values())
    with_graph = replace(served, has_graph=True)
    serving = {name for name, engine in SERVING_ENGINES.items() if not engine.reasons_against(with_graph)}
    assert serving == {"onnxruntime", "fastembed", "triton", "transformers_js"}


def test_trained_on_any_number_of_ranks_exported_and_reopened(ranks, run_inputs, tmp_path, monkeypatch):
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    for size, folder in runs.items():
        arguments = options(run_inputs, folder, "train.steps=3", "export.check=true", f"model.pooling={POOLING}")
        ranks(size, run, *arguments)
        assert losses(folder) == pytest.approx(losses(runs[1]), rel=1e-4)
    model = runs[2] / "model"
    with monkeypatch.context() as fresh, pytest.raises(ConfigError, match=rf"{POOLING}: a file cannot name code"):
        fresh.setattr(code, "_named", set())  # by commands of other tests
        fresh.setattr(code, "_registered", {})
        load_encoder(model)
    measured = evaluate(model, [str(run_inputs / "dev")], pooling=AttentionPooling, precision="fp32", quiet=True)
    assert measured["dev"]["ndcg@10"] == pytest.approx(metric_rows(runs[2])[-1]["ndcg@10"], abs=1e-6)

    backbone, weights = AutoModel.from_pretrained(model).eval(), load_file(model / "1_Pooling/model.safetensors")
    vectors = load_encoder(model, pooling=AttentionPooling, precision="fp32").encode(TEXTS)
    for vector, one in zip(torch.as_tensor(vectors), TEXTS, strict=True):
        with torch.no_grad():
            hidden = backbone(**small_tokenizer()(one, return_tensors="pt")).last_hidden_state[0]
        shares = (hidden @ weights["score.weight"].T + weights["score.bias"]).softmax(dim=0)
        torch.testing.assert_close(vector, nn.functional.normalize((hidden * shares).sum(dim=0), dim=0))
