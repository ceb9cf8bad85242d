"""Whole runs of cross-encoders: from rows to an exported reranker, on any number of ranks, stopped and resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from embedtrain.commands.export import compose
from embedtrain.commands.export import run as export
from embedtrain.config.command_options import RerankerConfig
from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Precision
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.command_model import load_reranker, open_reranker
from embedtrain.inference.pair_scorer import PairScorer
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import save_small, small_model, text, write_beir, write_rows
from tests.test_run_losses import BASE as OPTIONS
from tests.token_rerankers import QWEN3_CHAT, add_logit_score, chat_tokenizer, save_causal

BASE = [option for option in OPTIONS if not option.startswith(("model.pooling", "export.check"))]


def run(world, *arguments):
    return run_without_base(world, *BASE, *arguments)[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cross_encoder")
    write_rows(folder / "train.jsonl", 26)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [row | {"neg": [*row.get("neg", []), text(400 + i, 5)]} for i, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_beir(folder / "dev", 6)
    for architecture in ("xlm-roberta", "bert", "qwen3"):
        model = small_model(architecture)
        model.config |= {"bert": {"type_vocab_size": 2}, "qwen3": {"pad_token_id": None}}.get(architecture, {})
        save_small(model, folder / architecture)
    return folder


def options(inputs: Path, output_dir: Path, *more: str, model: str = "xlm-roberta") -> list[str]:
    return [
        "model.kind=cross_encoder", f"model.path={inputs / model}", f"data.train=[{inputs / 'train.jsonl'}]",
        "evaluation.rerank_depth=4", f"output_dir={output_dir}", *more,
    ]  # fmt: skip


def test_trained_evaluated_exported_and_resumed(ranks, inputs, tmp_path):
    common = ["loss=softmax", "data.batch_negatives=2", f"evaluation.sets=[{inputs / 'dev'}]", "checkpoint.every=2"]
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    for size, output_dir in runs.items():
        ranks(size, run, *options(inputs, output_dir, *common))
    first, second = (metric_rows(output_dir) for output_dir in runs.values())
    for left, right in zip(first, second, strict=True):
        assert left["step"] == right["step"]
        for name in ("loss", "grad_norm", "ndcg@10"):
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4)
    assert [row["dataset"]["kind"] for row in first if row.get("set") == "dev"] == ["reranking"] * 2
    assert all(row["dataset"]["first_stage"]["name"] == "bm25" for row in first if row.get("set") == "dev")
    # Stopped after step 2, the run resumes on another number of ranks, and the checkpoint can be exported.
    resumed = rewind_run(runs[2], tmp_path / "resumed", 2)
    ranks(1, run, *options(inputs, resumed, *common))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)
    for option, pattern in (
        ("formats=[adapter]", r"formats=\[adapter\]: .*lora"),
        ("truncate_dim=1", "truncate_dim=1: "),
    ):
        with pytest.raises(ConfigError, match=pattern):
            export(compose([f"run={runs[1]}", f"output_dir={tmp_path / 'again'}", option]))
    again = export(compose([f"run={runs[1]}", f"output_dir={tmp_path / 'again'}"]))
    weights = [load_file(folder / "model.safetensors") for folder in (runs[1] / "model", again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0].keys() | weights[1].keys())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout"),
    [(4, ["strategy=hsdp", "shard_size=2", "activation_checkpointing=true"]), (2, ["strategy=ddp"])],
    ids=["hsdp", "ddp"],
)
def test_every_layout_has_the_losses_of_one_rank(ranks, inputs, tmp_path, size, layout):
    more = [f"parallel.{option}" for option in layout]
    ranks(1, run, *options(inputs, tmp_path / "one", "loss=lambdaloss", model="bert"))
    ranks(size, run, *options(inputs, tmp_path / "many", "loss=lambdaloss", *more, model="bert"))
    one, many = (metric_rows(tmp_path / name) for name in ("one", "many"))
    for left, right in zip(one, many, strict=True):
        for name in left.keys() & {"step", "loss", "grad_norm"}:
            assert right[name] == pytest.approx(left[name], rel=1e-4)


def test_exports_score_as_the_run_did(ranks, inputs, tmp_path):
    """The run itself compares its export with transformers, sentence-transformers and onnxruntime."""
    more = ("loss=bce", "export.formats=[onnx]", "model.query_prompt='alpha '", "model.document_prompt='beta '")
    output = ranks(2, run, *options(inputs, tmp_path / "run", *more, model="bert"))[0]
    assert "reopening it with sentence-transformers" in output
    assert "reopening it with onnxruntime" in output
    reranker = CrossEncoder(str(tmp_path / "run/model"), device="cpu")
    assert isinstance(reranker.activation_fn, torch.nn.Sigmoid)
    prompts = {"query": "alpha ", "document": "beta "}
    source = open_model_source(RerankerConfig(path=str(tmp_path / "run/model")).model_config(trust_remote_code=False))
    assert reranker.prompts == source.prompts == prompts
    ranking = reranker.rank(text(1, 3), [text(2, 4), text(3, 30), text(4, 1)])
    assert sorted(entry["corpus_id"] for entry in ranking) == [0, 1, 2]
    card = (tmp_path / "run/model/README.md").read_text()
    assert "CrossEncoder(" in card
    assert "onnx/model.onnx" in card
    assert all(repr(prompt) in card for prompt in prompts.values())
    assert "pipeline_tag: text-ranking" in card


def test_the_export_of_a_model_of_two_labels_has_one(ranks, inputs, tmp_path):
    """Its scores are the difference of the logits, and its probabilities those of the softmax."""
    config = AutoConfig.from_pretrained(inputs / "bert", num_labels=2, problem_type="single_label_classification")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    AutoTokenizer.from_pretrained(inputs / "bert").save_pretrained(tmp_path / "two")
    labels = ["model.score_labels=[1,0]", f"model.path={tmp_path / 'two'}", "loss=bce", "optim.lr=1e-12"]
    adapters = ["model.lora.rank=2", "export.formats=[adapter]", "train.steps=1"]
    ranks(2, run, *options(inputs, tmp_path / "run", *labels, *adapters))
    pairs = [(text(seed, 3), text(seed + 1, 9)) for seed in range(5)]
    logits, exported = (
        CrossEncoder(str(path), device="cpu").predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
        for path in (tmp_path / "two", tmp_path / "run/model")
    )
    torch.testing.assert_close(exported, logits[:, 1] - logits[:, 0], rtol=1e-4, atol=1e-5)
    probabilities = CrossEncoder(str(tmp_path / "run/model"), device="cpu").predict(pairs, convert_to_tensor=True)
    torch.testing.assert_close(probabilities, logits.softmax(dim=1)[:, 1], rtol=1e-4, atol=1e-5)
    settings = json.loads((tmp_path / "run/model/config.json").read_text())
    assert len(settings["id2label"]) == 1
    assert settings.get("problem_type") is None


def assert_same_weights(first: Path, second: Path, *names: str) -> None:
    for name in names:
        expected, weights = load_file(first / name), load_file(second / name)
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-6, msg=key)


def scores_with_adapter(world, model, adapter, pairs):
    template = {"prefix": "alpha", "query": "{query}", "document": "{document}", "suffix": "mu nu"}
    reranker = RerankerConfig(path=str(model), adapter=adapter and str(adapter), pair_template=template)
    source = open_reranker(reranker, world, trust_remote_code=False)
    loaded = load_reranker(source, reranker, Precision.fp32, world)
    return PairScorer.from_model(loaded, world, chunk_tokens=64).score(*zip(*pairs, strict=True)).tolist()


def test_adapters_and_the_head_score_on_the_base_as_the_merged_model(ranks, inputs, tmp_path):
    """Opened by PEFT on transformers' class, and by `reranker={path: BASE, adapter: DIR}`; of the right base only."""
    base = tmp_path / "base"
    shutil.copytree(inputs / "qwen3", base)
    template = 'model.pair_template={prefix: alpha, query: "{query}", document: "{document}", suffix: mu nu}'
    more = ("loss=ranknet", "model.lora.rank=4", "optim.lr=1e-2", template, f"model.path={base}")
    output = ranks(2, run, *options(inputs, tmp_path / "run", *more, "export.formats=[adapter]"))[0]
    assert "reopening the adapter with PEFT" in output
    merged, adapter = tmp_path / "run/model", tmp_path / "run/model/adapter"
    pairs = [(text(1, 3), text(2, 4)), (text(2, 5), text(3, 30))]
    reranker = CrossEncoder(str(merged), device="cpu", activation_fn=torch.nn.Identity())
    expected = reranker.predict(pairs).tolist()
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    peft = PeftModel.from_pretrained(classifier, str(adapter)).eval()
    assert peft.peft_config["default"].task_type == "SEQ_CLS"
    tokenizer = AutoTokenizer.from_pretrained(merged)
    scores = [peft(**tokenizer(*pair, truncation=True, return_tensors="pt")).logits.item() for pair in pairs]
    assert scores == pytest.approx(expected, abs=1e-4)
    assert ranks(1, scores_with_adapter, base, adapter, pairs)[0] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(AssertionError, match="reranker="):
        ranks(1, scores_with_adapter, base, None, pairs)
    again = export(compose([f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'again'}"]))
    assert_same_weights(merged, again, "model.safetensors", "adapter/adapter_model.safetensors")
    weights = load_file(base / "model.safetensors")
    save_file({name: weight + 0.1 for name, weight in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"other weights than {base}"):
        export(compose([f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'other'}"]))


@pytest.mark.slow
def test_adapters_on_a_reranker_of_tokens(ranks, inputs, tmp_path):
    """From a LogitScore directory to one whose chat template and tokenizer format pairs as it did."""
    directory = add_logit_score(save_causal(tmp_path / "base"), "yes", "no", QWEN3_CHAT)
    more = ("loss=bce", "model.lora.rank=4", "optim.lr=1e-2", f"model.path={directory}", "train.chunk_tokens=2000")
    output = ranks(2, run, *options(inputs, tmp_path / "run", *more, "export.formats=[logit_score]"))[0]
    assert "the score of a token" in output
    assert "reopening it with sentence-transformers" in output
    merged = tmp_path / "run/model"
    pairs = [("Is it?", "alpha beta"), ("gamma", "delta? " * 200)]
    scores = {
        name: CrossEncoder(str(path), device="cpu", activation_fn=torch.nn.Identity()).predict(pairs).tolist()
        for name, path in (("base", directory), ("merged", merged), ("causal", merged / "logit_score"))
    }
    assert scores["causal"] == pytest.approx(scores["merged"], abs=1e-4)
    causal, vocabulary = (load_file(path / "model.safetensors") for path in (merged / "logit_score", directory))
    rows, tied = causal["lm_head.weight"], vocabulary["model.embed_tokens.weight"]
    yes = chat_tokenizer().convert_tokens_to_ids("yes")
    assert [row for row in range(len(rows)) if not torch.equal(rows[row], tied[row])] == [yes]
    assert scores["merged"] != pytest.approx(scores["base"], abs=1e-3)
    assert ranks(2, scores_of_pairs, merged, pairs)[0] == pytest.approx(scores["merged"], abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    formatted = [
        (f"<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n",
         f"<Document>: {document}") for query, document in pairs[:1]
    ]  # fmt: skip
    classifier = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    logits = classifier(**tokenizer(*formatted[0], return_tensors="pt")).logits
    assert logits.item() == pytest.approx(scores["merged"][0], abs=1e-4)
    again = export(compose([f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'again'}"]))
    assert_same_weights(merged, again, "model.safetensors", "logit_score/model.safetensors")
    with pytest.raises(AssertionError, match=r"export\.formats: logit_score"):
        ranks(1, run, *options(inputs, tmp_path / "new", "loss=bce", "export.formats=[logit_score]", model="bert"))


def scores_of_pairs(world, path, pairs):
    reranker = RerankerConfig(path=str(path))
    loaded = load_reranker(open_reranker(reranker, world, trust_remote_code=False), reranker, Precision.fp32, world)
    return PairScorer.from_model(loaded, world, chunk_tokens=2000).score(*zip(*pairs, strict=True)).tolist()


def test_equal_scores_of_all_documents_are_warned_about_once(ranks, inputs, tmp_path):
    """A reranker that has diverged gives every document one score, and its loss is the logarithm of their number."""
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "xlm-roberta", num_labels=1)
    torch.nn.init.zeros_(model.classifier.dense.weight)
    torch.nn.init.zeros_(model.classifier.dense.bias)
    torch.nn.init.zeros_(model.classifier.out_proj.weight)
    shutil.copytree(inputs / "xlm-roberta", tmp_path / "constant")
    model.save_pretrained(tmp_path / "constant")
    more = [
        "loss=softmax",
        "data.batch_negatives=1",
        "train.steps=3",
        "export.check=false",
        f"model.path={tmp_path / 'constant'}",
    ]
    outputs = ranks(2, run_without_base, *BASE, *options(inputs, tmp_path / "run", *more))
    warnings = [line for output in outputs for text in output for line in text.splitlines() if "score_range=0" in line]
    assert len(warnings) == 1
    assert all(advice in warnings[0] for advice in ("step 1", "optim.lr", "optim.warmup"))
    assert [row["score_range"] for row in metric_rows(tmp_path / "run") if "loss" in row] == [0.0, 0.0, 0.0]


def test_a_loss_of_vectors_is_rejected(inputs, tmp_path):
    with pytest.raises(ConfigError, match=r"loss=infonce.*loss=softmax"):
        compose_recipes([*BASE, *options(inputs, tmp_path)])
