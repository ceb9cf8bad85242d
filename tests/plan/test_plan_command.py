"""`python -m embedtrain plan`: tables and JSON for real models on many GPUs, without a GPU, data or weights."""

import json
import re
import time
from dataclasses import replace

import pytest

from embedtrain.commands.plan import PlanOptions, compose_plan
from embedtrain.commands.plan.compute import plan, planned_model
from embedtrain.config.recipe import Strategy
from embedtrain.errors import ConfigError
from tests.commands import call, call_separately
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE
from tests.small import save_small, small_model


def shape(config):
    return "model.config={" + ", ".join(f"{key}: {value}" for key, value in config.items()) + "}"


def planned(*arguments):
    return plan(*compose_plan(list(arguments)))


@pytest.mark.quick("config0-cls-512", "config1-last-64")
@pytest.mark.parametrize("gpus", [8, 64, 512])
@pytest.mark.parametrize(("config", "pooling"), [(XLMR_LARGE, "cls"), (LLAMA_3_8B, "last")])
def test_large_models_on_many_gpus_are_planned_quickly(config, pooling, gpus):
    began = time.process_time()
    result = planned(shape(config), f"model.pooling={pooling}", f"gpus={gpus}", f"train.global_batch_size={64 * gpus}")
    assert time.process_time() - began < 15
    assert result.best.fits
    assert result.cluster.ranks == gpus
    assert result.best.layout.replicate * result.best.layout.shard == gpus
    expected = {XLMR_LARGE["vocab_size"]: Strategy.ddp}.get(config["vocab_size"])
    if expected is not None:
        assert result.best.layout.strategy is expected
    else:
        assert result.best.layout.strategy is (Strategy.fsdp if gpus == 8 else Strategy.hsdp)
    assert result.next_best is not None
    assert result.largest_chunk is not None


def test_the_command_prints_tables(tmp_path):
    output = call("plan", "recipe=bce_xlmr", shape(XLMR_LARGE), "model.path=null", "gpus=16")
    for text in (
        "== plan of bce_xlmr ==",
        "XLMRobertaModel, 558,840,832 parameters",
        "chosen     ddp: fits on every rank",
        "memory per GPU, GiB",
        "host memory per node, GiB",
        "copies for asynchronous checkpoints",
        "optimizer",
        "gradients being reduced",
        "all-gathers of weights",
        "largest that fits",
    ):
        assert text in output, output


@pytest.mark.slow
def test_rows_of_a_cross_encoder_have_a_pair_for_each_negative():
    """The recipe draws 7 negatives of each row."""
    common = ["recipe=bce_reranker", shape(XLMR_LARGE), "model.path=null"]
    assert "128 rows, 1,024 pairs of 512 tokens" in call("plan", *common)
    assert planned(*common, "texts_per_row=3").work.texts_per_row == 2


BATCH = [
    "model.pooling=cls",
    "train.chunk_tokens=32768",
    "train.global_batch_size=128",
    "gpus=1",
    "model.max_length=64",
]


@pytest.mark.slow
def test_negatives_are_planned_as_they_are_drawn(tmp_path):
    """Of the first rows of files that are here, at most as many as the source draws; else those it asks for."""
    rows = [{"query": "q", "positive": "p", "negatives": [f"n{i}" for i in range(count)]} for count in (2, 5, 3)]
    (tmp_path / "mined.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs.csv").write_text("query,positive\na,b\n")
    common = [shape(XLMR_LARGE), *BATCH]

    def work(*sources):
        return planned(*common, f"data.train=[{','.join(sources)}]").work

    mined, pairs = tmp_path / "mined.jsonl", tmp_path / "pairs.csv"
    assert work(str(mined)).texts_per_row == 7
    assert work(f"{{path: {mined}, negatives: 4}}").texts_per_row == 6
    assert work(f"{{path: {mined}, negatives: null}}", str(pairs)).texts_per_row == 7
    assert work(str(pairs)).texts_per_row == 2
    assert work("{path: gone/rows.jsonl, negatives: 4}").texts_per_row == 6
    assert work("gone/rows.jsonl").texts_per_row == 2
    assert planned(*common, f"data.train=[{mined}]", "texts_per_row=3").work.texts_per_row == 3
    pairs_seconds = planned(*common, f"data.train=[{pairs}]").best.traffic.compute
    four_seconds = planned(*common, f"data.train=[{{path: {mined}, negatives: 4}}]").best.traffic.compute
    assert four_seconds >= 3 * pairs_seconds, "three times the texts, of which some are encoded twice"


def test_what_is_not_known_and_what_is_not_limited_is_said(tmp_path):
    page = call("plan", shape(XLMR_LARGE), *BATCH, "data.train=[gone/rows.jsonl]")
    assert "the rows are not here" in page
    assert "at the length limit of 64 tokens; tokens_per_text=N" in page
    assert "one chunk has all 16,384 tokens of a GPU in a step" in page, page
    assert "largest that fits  any: one chunk with all 16,384 tokens" in page, page
    assert "communication that computation does not hide" in page


@pytest.mark.slow
def test_the_vocabulary_head_of_a_sparse_model():
    words, hidden, tokens = 30_522, 128, 16_384
    config = {"model_type": "bert", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 512, "vocab_size": words}
    arguments = ["recipe=splade", "model.path=null", shape(config), "model.max_length=256", "gpus=1"]
    result = planned(*arguments, "train.global_batch_size=64", f"train.chunk_tokens={tokens}")
    head = result.vocabulary_head
    assert (head.words, head.blocks, head.logits) == (words, 8, 2 * tokens * 4096)
    assert head.weights == 128 * words * 8
    assert head.flops == 6 * 128 * 256 * words * hidden
    assert result.best.traffic.compute * result.cluster.flops > head.flops
    # The weights of words are between the forward and the backward pass.
    assert result.model.activations(False).rest > words * 8 / 256
    printed = call("plan", *arguments)
    assert "30,522 words in 8 blocks of 4,096, 0.12 GiB of logits at a time" in printed


@pytest.mark.slow
def test_only_json_is_printed():
    """The exit code is 1 if the training does not fit."""
    arguments = ["plan", shape(LLAMA_3_8B), "model.pooling=last", "--json"]
    result = json.loads(only_stdout(*arguments, "gpus=8"))
    assert set(result) == {
        "recipe", "model", "cluster", "work", "chosen", "next_best", "vocabulary_head", "largest_chunk", "changes",
        "assumptions"
    }  # fmt: skip
    chosen = result["chosen"]
    by_kind = {name: value for name, value in chosen["memory"].items() if name not in ("total", "phase")}
    assert sum(by_kind.values()) == pytest.approx(chosen["memory"]["total"])
    assert set(by_kind) == {
        "parameters", "gradients", "optimizer", "activations", "loss", "gathered", "reducing", "pictures"
    }  # fmt: skip
    assert chosen["fits"] is True
    host = chosen["host_memory"]
    assert host["total"] == sum(value for name, value in host.items() if name != "total")
    assert host["checkpoint"] == pytest.approx(12 * 7_504_924_672)
    assert result["model"]["parameters"] == 7_504_924_672
    assert result["changes"] == []
    tight = json.loads(only_stdout(*arguments, "gpus=1", "gpu_memory=16", code=1))
    assert tight["chosen"]["fits"] is False
    assert tight["changes"]


def only_stdout(*arguments, code=0):
    return call_separately(*arguments, code=code)[0]


def test_a_directory_without_weights_is_enough(tmp_path):
    directory = save_small(small_model("bert"), tmp_path / "model")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    (directory / "tokenizer.json").unlink()
    result = planned(f"model.path={directory}", "model.pooling=mean", "gpus=1")
    assert result.best.layout.strategy is Strategy.ddp
    assert result.model.weights.parameters == 19232


def test_only_the_configuration_of_a_hub_repository_is_downloaded(tmp_path, monkeypatch):
    directory = save_small(small_model("bert"), tmp_path / "snapshot")
    options = []

    def fetched(path, revision, option, revision_option, only):
        options.append((path, revision, only))
        return directory

    monkeypatch.setattr("embedtrain.formats.hub.resolve_directory", fetched)
    planned("model.path=someone/model", "model.revision=v1", "model.pooling=mean", "gpus=1")
    ((path, revision, only),) = options
    assert (path, revision) == ("someone/model", "v1")
    assert "config.json" in only
    assert not any(name.endswith(("safetensors", ".bin", "tokenizer.json", "index.json")) for name in only)


def test_options_of_the_recipe_and_of_the_hardware_on_one_command_line():
    recipe, options = compose_plan(["recipe=bce_xlmr", "gpus=64", "gpu_memory=40", "optim.lr=1e-3", "--json"])
    assert (recipe.name, recipe.optim.lr) == ("bce_xlmr", 1e-3)
    assert options == PlanOptions(gpus=64, gpu_memory=40.0, json=True)
    assert recipe.data.train == []  # a plan needs none


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpus=0"], r"gpus=0\b"),
        (["gpus=12"], r"gpus=12\b.*gpus_per_node=8\b.*gpus=8 or gpus=16"),
        (["gpu_memory=-1"], r"gpu_memory=-1"),
        (["tflops=0"], r"tflops=0"),
        (["tokens_per_text=0"], r"tokens_per_text=0\b"),
        (["gpus=many"], "gpus"),
        (["gpu=h100"], r"unknown option gpu=h100: .*gpu_memory"),
        (["num_gpus=8"], r"write gpus=8"),
        (["learning_rate=1"], r"write optim\.lr=1"),
        (["--gpus", "8"], r"write gpus=8$"),
        (["--gpu-memory=40"], r"write gpu_memory=40$"),
        (["/"], r"write model\.path=/$"),
        (["parallel.stratgy=ddp"], r"parallel\.stratgy.* strategy"),
        (["train.chunk_tokens=0"], r"train\.chunk_tokens=0\b"),
    ],
)
def test_an_invalid_option_is_reported_in_one_line(arguments, message):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        compose_plan(["recipe=bce_xlmr", *arguments])
    assert re.search(message, str(error.value))


def test_lora_needs_less_memory():
    arguments = [shape(LLAMA_3_8B), "model.pooling=last", "gpus=1", "parallel.cpu_offload=false"]
    whole, adapted = planned(*arguments), planned(*arguments, "model.lora.rank=16")
    assert not whole.best.fits
    assert any("model.lora.rank=16" in line for line in whole.changes)
    assert adapted.best.fits
    assert adapted.model.weights.frozen_by_dtype == {"bfloat16": 2 * 7_504_924_672}
    assert adapted.model.weights.trained < 0.01 * adapted.model.weights.parameters


def test_fused_kernels_are_counted_where_blocks_are_not_compiled():
    """By the condition of training, on GPUs with Triton."""
    recipe, options = compose_plan([shape(small_model("llama").config), *BATCH, "model.pooling=last"])

    def saved(**parallel):  # not composed, which asks for liger-kernel on this machine
        changed = replace(recipe, parallel=replace(recipe.parallel, fused_kernels=True, **parallel))
        return planned_model(changed, options).model.activations(False).block

    compiled = saved()
    assert saved(compile=True, deterministic=True) == compiled
    assert saved(compile=False) == saved(deterministic=True) < compiled


def test_host_memory_limits_offload():
    """Eight billion weights and their moments fit on no GPU; a host of 200 GB cannot hold them and copies either."""
    arguments = [shape(LLAMA_3_8B), "model.pooling=last", "gpus=1", "train.chunk_tokens=4096"]
    limited = planned(*arguments, "host_memory=200")
    assert not limited.best.fits
    page = call("plan", *arguments, "host_memory=2000")
    assert "CPU offload: fits on every rank" in page
    assert "2000.0 GiB per node, of which 1800.0 are usable" in page


def test_help_lists_the_options():
    output = call("plan", "--help")
    assert "gpus_per_node=8" in output
    assert "embedtrain train --help" in output


def test_a_search_of_many_documents():
    common = ["plan", shape(XLMR_LARGE), "model.pooling=cls", "documents=1000000000", "gpus=64"]
    common += ["tokens_per_text=128", "queries=100000", "gpu_memory=40"]
    result = json.loads(call(*common, "index.scan_dtype=int8", "index.place=disk", "--json"))
    assert result["fits"] and result["on_device"]
    local = 1_000_000_000 / 64
    assert result["memory"]["index"] == local * (1024 + 8)
    assert result["memory"]["host_index"] == 0
    assert result["disk"] == 4e9 * 1024
    # Tokens of texts, and the arithmetic of a token's forward pass, with full attention.
    weights = XLMR_LARGE["vocab_size"] * 1024
    matmuls = result["model"]["parameters"] - weights - 515 * 1024
    flops = 2 * matmuls + 4 * 24 * 128 * 1024
    tokens = (1_000_000_000 + 100_000) * 128 / 64
    assert result["traffic"]["encode_seconds"] == pytest.approx(tokens * flops / 400e12, rel=0.01)
    assert result["traffic"]["search_seconds"] == pytest.approx(2 * 1e5 * local * 1024 / 40e12, rel=0.05)
    printed = call(*common, "index.scan_dtype=int8", "index.place=disk")
    assert "1,000,000,000 documents of 128 tokens, 100,000 queries" in printed and "limit" not in printed
    on_host = json.loads(call(*common, "--json"))
    assert not on_host["on_device"]
    assert on_host["memory"]["host_index"] == local * 4096


def test_a_search_of_pages():
    """A million documents of 1,030 vectors; the pooled ones are on the GPU, and all of them in host memory."""
    common = [
        "plan",
        shape(small_model("llama").config),
        "model.kind=late_interaction",
        "documents=1000000",
        "gpus=8",
        "queries=1000",
    ]
    common += ["tokens_per_text=1030", "tokens_per_query=30", "index.dtype=fp16", "index.first_stage=200"]
    result = json.loads(call(*common, "index.first_stage_pooling=16", "--json"))
    assert result["model"]["vectors"] == [30, 1030]
    assert result["on_device"] and result["fits"]
    assert result["memory"]["host_index"] == 125_000 * 1030 * 128 * 2
    assert result["memory"]["index"] == 125_000 * (1 + 1029 / 16) * 128 * 2
    products = 2 * 1000 * 30 * 125_000 * (1 + 1029 / 16) * 128
    assert result["traffic"]["search_seconds"] == pytest.approx(products / 40e12, rel=0.5)
    assert "1,030 vectors of 128 a document, 30 a query" in call(*common)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["queries=3"], "queries=3"),
        (["index.scan_dtype=int8"], "index.scan_dtype=int8"),
        (["documents=0"], "documents=0"),
        (["documents=5", "index.dtype=bf16", "index.scan_dtype=bf16"], "index.scan_dtype=bf16"),
        (["documents=5", "search_tflops=0"], "search_tflops=0"),
    ],
)
def test_options_of_a_search(arguments, option):
    with pytest.raises(ConfigError, match=re.escape(option)):
        compose_plan(["recipe=minilm", *arguments])
