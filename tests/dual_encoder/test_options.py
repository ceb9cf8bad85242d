"""What cannot work with two towers ends in one sentence; texts get the tokenizer and the chunks of their tower."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.api import load_encoder
from embedtrain.commands import calibrate, static, verify
from embedtrain.config.command_options import EncodeOptions
from embedtrain.config.compose import compose_recipes
from embedtrain.config.evaluation import Backend
from embedtrain.config.kinds import kind_of_files, trust_kind
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import ExportConfig
from embedtrain.config.validation import model_options_named
from embedtrain.data.chunks import plan_towers
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import joined_world
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.export import DerivedModel, open_model, write_derived
from embedtrain.formats.hub import download_configuration
from embedtrain.formats.source import different_setting, open_model_source
from embedtrain.formats.weights import write_architecture
from embedtrain.inference.loading.command_model import (
    MODEL_OPTION_NAMES,
    command_model_config,
    open_encoder_source,
)
from embedtrain.inference.loading.graph import load_graph
from embedtrain.inference.loading.load import model_tokenizer
from embedtrain.kinds.dual_encoder import DualEncoder
from embedtrain.kinds.dual_encoder.files import DualEncoderFiles
from embedtrain.kinds.dual_encoder.options import TowerOptions
from embedtrain.models.build import build_encoder, full_state_dict
from embedtrain.tracking.console import Console
from embedtrain.training.guides import load_guides
from embedtrain.training.inputs import check_local_inputs
from embedtrain.training.optimizer import trained_parameters
from tests.commands import call
from tests.dual_encoder.towers import DOCUMENT_LENGTH, QUERY_LENGTH, dual_options, save_towers
from tests.small import WORDS, model_options, parallel, save_small, small_model, text

RECIPE = ["name=t", "data.train=[x.jsonl]", "model.kind=dual_encoder"]
PATHS = ["model.query.path=a/b", "model.document.path=a/c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    save_towers(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ([], "model.query.path"),
        (["model.query.path=a/b"], "model.document.path"),
        ([*PATHS, "model.path=a/d"], "model.path and model.query.path=a/b"),
        ([*PATHS, "model.query.pooling=median"], "model.query.pooling=median"),
        ([*PATHS, "model.document.max_length=-1"], "model.document.max_length=-1"),
        ([*PATHS, "model.document.heads=[{out: 0}]"], r"model.document.heads\[0\].out=0"),
        ([*PATHS, "model.query.include_prompt=false", "model.query.pooling=cls"], "model.query.include_prompt=false"),
        ([*PATHS, "model.bidirectional=true"], "model.bidirectional=true"),
        ([*PATHS, "model.tokenizer=a/d"], "model.tokenizer=a/d"),
        ([*PATHS, "model.lora.path=a/d"], "model.lora.path=a/d"),
        ([*PATHS, "model.trust_remote_code=true"], "trust_remote_code=true"),
        ([*PATHS, "export.formats=[sentence_transformers,onnx]"], "export.formats=.*onnx"),
        ([*PATHS, "model.lora.rank=2", "export.formats=[adapter]"], "export.formats=.*adapter"),
        ([*PATHS, "loss.matryoshka.layers=[1]"], r"loss.matryoshka.layers=\[1\]"),
        ([*PATHS, "export.rope_theta=1e5"], "export.rope_theta"),
        ([*PATHS, "model.pooling=mean"], "model.pooling"),
    ],
)
def test_impossible_options(arguments, option):
    with pytest.raises(ConfigError, match=option):
        compose_recipes([*RECIPE, *arguments])


def test_dimensions_and_poolings_are_those_of_towers(folder, tmp_path):
    model = dual_options(folder)
    model.document.heads = []
    with pytest.raises(
        ConfigError, match=r"model.query .*32 .*model.document .*48.*model.document.heads=\[{out: 32}\]"
    ):
        open_model_source(model)
    model = model_options("dual_encoder", query=TowerOptions(path=str(folder / "query")), document=model.document)
    with pytest.raises(ConfigError, match=r"model\.query\.pooling"):
        open_model_source(model)
    dense = save_small(small_model("bert"), tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"model\.query\.path and model\.document\.path"):
        open_model_source(model_options("dual_encoder", path=str(dense)))


def test_what_is_no_directory_names_the_tower(folder):
    with pytest.raises(ModelError, match=r"model\.document\.path=/none"):
        check_local_inputs(
            compose_recipes([*RECIPE, f"model.query.path={folder / 'query'}", "model.document.path=/none"])[0]
        )
    model = dual_options(folder)
    assert download_configuration(model) is model, "local directories are opened once"


def test_learning_rates_of_layers_are_those_of_their_tower(folder):
    """The last block of each tower has the same rate, whatever the number of blocks of the other one."""
    encoder = build_encoder(open_model_source(dual_options(folder)))
    trained = trained_parameters(encoder, OptimConfig(layer_decay=0.5))
    rates = {item.name: item.settings.lr_factor for item in trained}
    blocks = {"query.backbone.encoder.layer.": 2, "document.backbone.layers.": 3}
    for prefix, number in blocks.items():
        for layer in range(number):
            of_layer = {rate for name, rate in rates.items() if name.startswith(f"{prefix}{layer}.")}
            assert of_layer == {0.5 ** (number - layer)}
    assert rates["document.dense.0.linear.weight"] == 1.0


def test_each_role_has_its_tokenizer_and_length(folder):
    tokenizer = model_tokenizer(open_model_source(dual_options(folder)))
    words = " ".join(WORDS)
    query, document = (tokenizer.tokens([words], role=role) for role in TextRole)
    assert (len(query.ids), len(document.ids)) == (QUERY_LENGTH, DOCUMENT_LENGTH)
    assert [tokenizer.chunk(tokens, [0]).tower for tokens in (query, document)] == [0, 1]
    shorter = dual_options(folder)
    shorter.query.max_length = QUERY_LENGTH - 1  # cached tokens of the longer texts are not those of shorter ones
    assert model_tokenizer(open_model_source(shorter)).fingerprint != tokenizer.fingerprint


@pytest.fixture(scope="module")
def router(folder, tmp_path_factory):
    """A directory with both towers, whose weights no test reads."""
    directory = tmp_path_factory.mktemp("router")
    source = open_model_source(dual_options(folder))
    write_architecture(directory, source, model_tokenizer(source))
    return directory


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (QUERY_LENGTH, DOCUMENT_LENGTH)),
        ({"max_length": 5}, (5, 5)),
        ({"query": TowerOptions(max_length=4)}, (4, DOCUMENT_LENGTH)),
        ({"document": TowerOptions(max_length=4), "max_length": 5}, (5, 4)),
    ],
)
def test_lengths_of_towers_in_one_directory(router, options, lengths):
    """Those of its files, unless options replace them."""
    tokenizer = model_tokenizer(open_model_source(model_options("dual_encoder", path=str(router), **options)))
    words = " ".join(WORDS)
    assert tuple(len(tokenizer.tokens([words], role=role).ids) for role in TextRole) == lengths
    assert tokenizer.max_length == max(lengths)


def test_a_command_replaces_the_lengths_of_towers(router):
    model = command_model_config(EncodeOptions(model=str(router), max_length=5))
    tokenizer = model_tokenizer(open_encoder_source(model)[1])
    assert [len(tokenizer.tokens([" ".join(WORDS)], role=role).ids) for role in TextRole] == [5, 5]


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_length_beyond_the_positions_names_the_tower(folder, router, role):
    """Towers have no `rope_scaling`, and a command has one option for both."""
    model = dual_options(folder)
    getattr(model, role).max_length = 500
    message = rf"model\.{role}\.max_length=500: .* only (\d+) positions: write model\.{role}\.max_length=\1$"
    with pytest.raises(ConfigError, match=message):
        model_tokenizer(open_model_source(model))
    options = command_model_config(EncodeOptions(model=str(router), max_length=500))
    with (
        pytest.raises(ConfigError, match=r"^max_length=500: .* write max_length="),
        model_options_named(MODEL_OPTION_NAMES),
    ):
        model_tokenizer(open_encoder_source(options)[1])


def test_an_adapter_is_of_one_tower(router):
    model = command_model_config(EncodeOptions(model=str(router), adapter="/none"))
    message = rf"^adapter=/none: .*, or write model={router}/query or model={router}/document$"
    with pytest.raises(ConfigError, match=message), model_options_named(MODEL_OPTION_NAMES):
        open_encoder_source(model)


def test_different_settings_name_the_tower(folder):
    source, model = open_model_source(dual_options(folder)), dual_options(folder)
    assert different_setting(source, open_model_source(model)) is None
    model.query.pooling = "cls"
    assert different_setting(source, open_model_source(model)) == "query: pooling is 'cls', not 'mean'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["sentence_transformers", "adapter"]}, r"^formats=\[sentence_transformers,adapter\]: .*leave it"),
        ({"formats": ["sentence_transformers", "onnx"]}, r"^formats=.*onnx has one tower"),
        ({"max_file_size": "1GB"}, r"^max_file_size=1GB: .*leave it out"),
        ({"rope_theta": 1e5}, r"^rope_theta=100000: .*leave it out"),
    ],
)
def test_impossible_exports(options, message):
    with pytest.raises(ConfigError, match=message):
        DualEncoderFiles().check_export(ExportConfig(**options), "dual_encoder")
    DualEncoderFiles().check_export(ExportConfig(truncate_dim=8), "dual_encoder")


def test_a_tower_alone_computes_the_same(folder, tmp_path):
    """Its folder has the prompts, the similarity and the dimensions of the whole model."""
    model = dual_options(folder, query_prompt="alpha ", document_prompt="beta ", similarity=VectorSimilarity.dot)
    model.query.normalize = model.document.normalize = False
    source = open_model_source(model)
    derived = DerivedModel(source, full_state_dict(source, 0), model_tokenizer(source), "towers", "a copy of {}")
    directory, config = tmp_path / "model", ExportConfig(truncate_dim=16)
    write_derived(derived, directory, config, Console(enabled=False), trust_remote_code=False)
    texts = [text(1, 2), text(2, 5), text(3, 20)]
    with load_encoder(directory, quiet=True) as encoder:
        expected = {"query": encoder.encode_queries(texts), "document": encoder.encode_documents(texts)}
    for role, vectors in expected.items():
        alone = SentenceTransformer(str(directory / role), device="cpu")
        assert alone.similarity_fn_name == "dot"
        encode = alone.encode_query if role == "query" else alone.encode_document
        np.testing.assert_allclose(encode(texts), vectors, rtol=1e-5, atol=1e-5)
        assert vectors.shape[1] == 16


@pytest.mark.parametrize("command", [static, calibrate, verify])
def test_commands_for_one_model_say_so_before_they_read_weights(router, tmp_path, command):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "alpha"}\n{"_id": "2", "text": "beta"}\n')
    arguments = [f"model={router}"]
    if command is not verify:
        arguments.append(f"output_dir={tmp_path / 'out'}")
    if command is calibrate:
        arguments.append(f"data={tmp_path / 'corpus.jsonl'}")
    with pytest.raises(ConfigError, match=rf"model={router}: .*{router}/query or {router}/document"):
        command.run(command.compose(arguments))


def test_a_graph_is_not_advised(router):
    with (
        pytest.raises(ConfigError, match=r"backend=onnx: model.kind=dual_encoder .*write torch"),
        joined_world() as world,
    ):
        load_graph(open_model_source(model_options("dual_encoder", path=str(router))), Backend.onnx, world)


def test_what_is_wrong_in_a_router_is_no_option_of_a_command(router, tmp_path):
    directory = shutil.copytree(router, tmp_path / "model")
    pooling = directory / "query/1_Pooling/config.json"
    stored = pooling.read_text()
    pooling.write_text(json.dumps({"pooling": "module:Own"}))
    (directory / "embedtrain.json").unlink(missing_ok=True)
    model = model_options("dual_encoder", path=str(directory))
    with pytest.raises(ModelError, match=r"query: .*module:Own"):
        open_model_source(model)
    pooling.write_text(stored)
    modules = json.loads((directory / "router_config.json").read_text())
    modules["structure"]["document"] = [name for name in modules["structure"]["document"] if "Dense" not in name]
    (directory / "router_config.json").write_text(json.dumps(modules))
    message = rf"model={directory}: .*32 dimensions of queries"
    with pytest.raises(ModelError, match=message), model_options_named(MODEL_OPTION_NAMES):
        open_model_source(model)


class Derived(DualEncoder):
    """Of the user's own."""


def test_a_kind_of_the_user_with_towers_is_named_in_its_directory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("embedtrain.config.kinds._user_kinds", {})  # of this test only
    path = f"{__name__}:Derived"
    source = replace(open_model_source(dual_options(folder)), kind=trust_kind(path, "model.kind"))
    write_architecture(tmp_path, source, model_tokenizer(source))
    assert kind_of_files(tmp_path)[0].name == path


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_chunk_has_texts_of_one_tower(size):
    lengths, towers = np.array([5, 9, 3, 40, 7, 7, 20]), np.array([0, 0, 0, 1, 1, 1, 1])
    plan = plan_towers(lengths, towers, size, 24, 4)
    ranks = [plan.chunks_of_rank(rank) for rank in range(size)]
    assert all(len(chunks) == plan.num_chunks == len(plan.towers) for chunks in ranks)
    for tower, of_ranks in zip(plan.towers, zip(*ranks, strict=True), strict=True):
        assert {int(towers[text]) for chunk in of_ranks for text in chunk} == {tower}
    assert sorted(text for chunks in ranks for chunk in chunks for text in chunk) == list(range(7))
    assert plan.towers[0] == 1, "the longest text comes first"
    owners = [rank for text in range(7) for rank, chunks in enumerate(ranks) if any(text in chunk for chunk in chunks)]
    assert plan.encoder_rank.tolist() == owners


def test_a_router_is_no_model_of_another_kind(folder, tmp_path):
    """A dense recipe names the kind, and a command that changes one model the folders of both."""
    source = open_model_source(dual_options(folder))
    write_architecture(tmp_path, source, model_tokenizer(source))
    with pytest.raises(ConfigError, match=r"model.kind=dense: .*model.kind=dual_encoder"):
        open_model_source(model_options(path=str(tmp_path), pooling="mean"))
    with pytest.raises(ConfigError, match=f"model={tmp_path}: .*{tmp_path}/query or {tmp_path}/document"):
        open_model(str(tmp_path), None, None, None, trust_remote_code=False)
    with pytest.raises(ConfigError, match=f"{tmp_path}: .*embedtrain vectors"):
        load_guides([str(tmp_path)], parallel(), None, chunk_tokens=100)
    output = call("merge", f"models=[{tmp_path},{tmp_path}]", f"output_dir={tmp_path / 'merged'}", code=1)
    assert f"{tmp_path}/query or {tmp_path}/document" in output
