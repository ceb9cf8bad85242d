"""Positions beyond the trained length equal those of transformers, also in an export."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.export import run as export_main
from embedtrain.config.checks import check_model, check_rope_scaling
from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer, resolve_max_length
from embedtrain.models.build import assemble_encoder
from embedtrain.models.rope import RopeTheta
from tests.checkpoint.exporting import architecture_of, export_model
from tests.commands import call
from tests.runs import evaluation_metrics, run
from tests.small import model_options, save_small, small_model, text, write_beir, write_rows

YARN = {"rope_type": "yarn", "factor": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def opened(architecture: str, scaling: object, **options: object):
    return open_model_source(small_model(architecture, rope_scaling=scaling, **options))


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 4}], ids=lambda s: s["rope_type"])
def test_text_beyond_the_models_positions(scaling, tmp_path):
    directory = save_small(small_model("llama"), tmp_path / "llama")
    plain = model_options(path=str(directory), pooling=Pooling.mean, max_length=200)
    options = model_options(path=str(directory), pooling=Pooling.mean, max_length=200, rope_scaling=scaling)
    built = architecture_of(tmp_path / "made", options)
    assert (built.max_length, built.source.config.max_position_embeddings) == (200, 256)
    export_model(tmp_path / "out", built)  # reopened by both libraries, and compared on a text of 200 tokens
    encoder = assemble_encoder(built.source).eval()
    encoder.load_state_dict(built.state)
    backbone, tokenizer = AutoModel.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer(text(3, 300), truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (1, 200)
    with torch.no_grad():
        actual = encoder.backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        theirs = backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        torch.testing.assert_close(actual.last_hidden_state, theirs.last_hidden_state)
        unscaled = assemble_encoder(open_model_source(plain)).eval()
        unscaled.load_state_dict(built.state)
        before = unscaled.backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert (before.last_hidden_state - actual.last_hidden_state).abs().max() > 1e-2
    # Opened again it is what it is, and nothing is scaled twice.
    again = open_model_source(model_options(path=str(tmp_path / "out")))
    assert again.config.rope_parameters == built.source.config.rope_parameters
    assert resolve_max_length(again, tokenizer) == 200
    twice = open_model_source(model_options(path=str(tmp_path / "out"), rope_scaling=scaling | {"factor": 8}))
    expected = 256 * 8 if scaling["rope_type"] == "linear" else 64 * 8  # a linear one does not store what was before
    assert twice.config.max_position_embeddings == expected


@pytest.mark.parametrize("architecture", ["gemma3_text", "modernbert"])
def test_layers_with_a_window_are_not_scaled(architecture):
    before = open_model_source(small_model(architecture)).config.rope_parameters
    small = small_model(architecture, rope_scaling=YARN)
    small.config |= {"layer_types": ["sliding_attention", "full_attention"]}
    config = open_model_source(small).config
    assert config.rope_parameters["sliding_attention"] == before["sliding_attention"]
    actual = config.rope_parameters["full_attention"]
    assert actual == before["full_attention"] | YARN | {"original_max_position_embeddings": 64}
    ids = torch.arange(200)[None] % 60 + 4
    with torch.no_grad():
        assemble_encoder(open_model_source(small)).eval()(Chunk(ids, torch.ones_like(ids)))


@pytest.mark.parametrize(
    ("scaling", "pattern"),
    [
        (4, r"model\.rope_scaling=4: .* rope_type and factor"),
        ({"factor": 4}, "rope_type=None: .* yarn, linear, llama3"),
        ({"rope_type": "yran", "factor": 4}, "rope_type=yran: .* yarn, linear, llama3"),
        ({"rope_type": "dynamic", "factor": 4}, "by the longest text of a batch"),
        ({"rope_type": "longrope", "factor": 4}, "by the longest text of a batch"),
        ({"rope_type": "yarn"}, "factor=None"),
        ({"rope_type": "yarn", "factor": 1}, "above 1"),
        ({"rope_type": "yarn", "factor": float("nan")}, "above 1"),
        ({"rope_type": "yarn", "factor": True}, "above 1"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({"rope_type": "llama3", "factor": 4}, "low_freq_factor"),
        (YARN | {"beta_fast": "fast"}, "beta_fast"),
        (YARN | {"beta_fats": 3}, "beta_fats"),
    ],
)
def test_invalid_values(scaling, pattern):
    with pytest.raises(ConfigError, match=pattern) as caught:
        opened("llama", scaling)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, YARN | {"original_max_position_embeddings": 8}])
def test_valid_mappings(scaling):
    check_rope_scaling(scaling)


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "mpnet", "distilbert"])
def test_model_without_rotary_positions(architecture):
    with pytest.raises(ConfigError, match=r"model\.rope_scaling=.* no rotary positions"):
        opened(architecture, YARN)


def test_length_beyond_the_positions(tmp_path):
    for architecture, more in (("llama", True), ("bert", False)):
        directory = save_small(small_model(architecture), tmp_path / architecture)
        source = open_model_source(model_options(path=str(directory), pooling=Pooling.mean, max_length=150))
        with pytest.raises(ConfigError, match=r"model\.max_length=150: .* model\.max_length=64") as caught:
            resolve_max_length(source, load_tokenizer(source))
        assert ("or model.rope_scaling={rope_type: yarn, factor: 3} for more" in str(caught.value)) is more
    source = open_model_source(
        model_options(
            path=str(tmp_path / "llama"), pooling=Pooling.mean, max_length=150,
            rope_scaling={"rope_type": "yarn", "factor": 3},
        )
    )  # fmt: skip
    assert resolve_max_length(source, load_tokenizer(source)) == 150


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_texts_end_where_positions_would_follow_the_longest_of_a_batch(parameters, tmp_path):
    """The configuration of a directory may scale positions by batch, which the option of that name rejects."""
    small = small_model("llama")
    parameters = parameters | {"rope_theta": 10000.0, "original_max_position_embeddings": 40}
    small.config |= {"rope_parameters": parameters, "max_position_embeddings": 80}
    directory = save_small(small, tmp_path / "llama")
    source = open_model_source(model_options(path=str(directory), pooling=Pooling.mean))
    assert resolve_max_length(source, load_tokenizer(source)) == 40
    source = open_model_source(model_options(path=str(directory), pooling=Pooling.mean, max_length=41))
    with pytest.raises(ConfigError, match=r"model\.max_length=41: .* write model\.max_length=40"):
        resolve_max_length(source, load_tokenizer(source))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "modernbert"])
def test_another_base_of_the_frequencies(architecture, tmp_path):
    """As if the configuration had it, in training and in an export, which transformers 4 and 5 read."""
    small = small_model(architecture)
    own = open_model_source(small).config.rope_parameters
    layers = "full_attention" in own
    small.config |= {"layer_types": ["sliding_attention", "full_attention"]} if layers else {}
    directory = save_small(small, tmp_path / "model")
    built = architecture_of(tmp_path / "made", model_options(path=str(directory), pooling=Pooling.mean, rope_theta=500))
    changed = built.source.config.rope_parameters
    if layers:
        assert changed["sliding_attention"] == own["sliding_attention"], "layers with a window keep theirs"
        changed = changed["full_attention"]
    assert changed["rope_theta"] == 500
    encoder = assemble_encoder(built.source).eval()
    encoder.load_state_dict(built.state)
    served, tokens = RopeTheta(encoder, 9000.0, "export.rope_theta"), torch.tensor([[0, 5, 9, 4, 7, 8, 6, 2]])
    with torch.no_grad():
        trained = encoder(Chunk(tokens, torch.ones_like(tokens)))[0]
        with served.in_place():
            vectors = encoder(Chunk(tokens, torch.ones_like(tokens)))[0]
        assert encoder(Chunk(tokens, torch.ones_like(tokens)))[0].equal(trained)
    assert (vectors - trained).abs().max() > 1e-4
    export_model(tmp_path / "out", built, rope_theta=9000.0, check=False)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["global_rope_theta" if architecture == "modernbert" else "rope_theta"] == 9000
    again = assemble_encoder(open_model_source(model_options(path=str(tmp_path / "out")))).eval()
    again.load_state_dict(built.state)
    with torch.no_grad():
        torch.testing.assert_close(again(Chunk(tokens, torch.ones_like(tokens)))[0], vectors)


def test_a_base_without_rotary_positions_is_rejected():
    with pytest.raises(ConfigError, match=r"model\.rope_theta=500: xlm-roberta"):
        open_model_source(small_model("xlm-roberta", rope_theta=500))
    with pytest.raises(ConfigError, match=r"model\.rope_theta=0"):
        check_model(small_model("llama", rope_theta=0))


@pytest.mark.slow
def test_a_run_serves_another_base_than_it_trains(ranks, tmp_path):
    """Its evaluations measure the exported model, which an export of its checkpoint equals."""
    rows, dev = write_rows(tmp_path / "train.jsonl", 24), write_beir(tmp_path / "dev", 12)
    model, out = save_small(small_model("llama"), tmp_path / "model"), tmp_path / "run"
    options = [
        f"model.path={model}", "model.pooling=mean", f"data.train=[{rows}]", f"output_dir={out}", "train.steps=3",
        "model.rope_theta=20", "export.rope_theta=5000", f"evaluation.sets=[{dev}]", "evaluation.every=3",
        "export.check=true", "optim.ema=0.5",
    ]  # fmt: skip
    ranks(2, run, *options)
    assert json.loads((out / "architecture" / "config.json").read_text())["rope_theta"] == 20
    texts = ["alpha beta gamma delta", "delta kappa alpha mu nu zeta"]
    served = SentenceTransformer(str(out / "model"), device="cpu")
    assert served[0].auto_model.config.rope_parameters["rope_theta"] == 5000
    for theta in (5000, 20):
        export_main(compose_export([f"run={out}", f"output_dir={tmp_path / str(theta)}", f"rope_theta={theta}"]))
    again, trained = (SentenceTransformer(str(tmp_path / name), device="cpu").encode(texts) for name in ("5000", "20"))
    np.testing.assert_allclose(again, served.encode(texts), atol=1e-5)
    assert np.abs(trained - again).max() > 1e-3
    call("evaluate", f"model={out / 'model'}", f"sets=[{dev}]", f"output_dir={tmp_path / 'figures'}")
    actual = json.loads((tmp_path / "figures" / "metrics.jsonl").read_text().splitlines()[-1])
    expected = evaluation_metrics(out)[3]
    assert {name: actual[name] for name in ("ndcg@10", "mrr@10")} == pytest.approx(
        {name: expected[name] for name in ("ndcg@10", "mrr@10")}
    )
