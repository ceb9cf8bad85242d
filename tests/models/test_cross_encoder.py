"""Cross-encoders: scores of padded and packed pairs equal those of transformers' own classes, whatever the head."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder as CrossEncoder_
from sentence_transformers.models import Dense as StDense
from sentence_transformers.models import Pooling as StPooling
from sentence_transformers.models import Transformer
from tokenizers import processors
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from embedtrain.config.kinds import kind_of_files
from embedtrain.config.recipe import LoraConfig, ModelConfig, ParallelConfig, Precision, Strategy
from embedtrain.data.tokens import TextTokenizer, restore_order
from embedtrain.data.types import Pair
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.peft import open_adapter
from embedtrain.formats.sentence_transformers import SIGMOID
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.cross_encoder.model import PairLayout, ScoreHead, read_pair_format
from embedtrain.models.adapters import adapter_settings, add_adapters, initial_adapters, peft_key
from embedtrain.models.attention import CPU
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder, has_token_types, hidden_states
from embedtrain.models.own_class import own_class_mismatch, own_name
from embedtrain.models.packing import check_packing, enable_packing, packing_mismatch
from tests.small import model_options, parallel, save_small, small_model, small_tokenizer, text

# Every architecture with what differs from `small_model`.
CASES = {
    "bert": {"type_vocab_size": 2},
    "xlm-roberta": {},
    "distilbert": {},
    "mpnet": {},
    "electra": {"type_vocab_size": 2, "embedding_size": 16},
    "albert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 1},
    "eurobert": {},
    "deberta-v2": {"type_vocab_size": 2, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {},
    "modernbert, mean": {"classifier_pooling": "mean"},
    "qwen2": {},
    "qwen3": {},
    "llama": {"pad_token_id": 1},
    "mistral": {},
    "gemma3_text": {},
}
WITH_TYPES = {"bert", "electra", "albert", "deberta-v2"}
PADDED = {"deberta-v2", "mpnet"}  # they compute attention themselves


def reranker(case: str) -> ModelConfig:
    model = small_model(case.partition(",")[0], kind="cross_encoder", pooling=None)
    model.config |= CASES[case]
    return model


def build(case: str) -> Encoder:
    torch.manual_seed(0)
    encoder = assemble_encoder(open_model_source(reranker(case)))
    assert isinstance(encoder.output, ScoreHead)
    return encoder.eval()


def whole_class(encoder: Encoder) -> torch.nn.Module:
    """Transformers' class with the weights of `encoder`."""
    config = copy.deepcopy(encoder.backbone.config)
    model = AutoModelForSequenceClassification.from_config(config)
    model.load_state_dict({own_name(n, model.base_model_prefix): w for n, w in encoder.state_dict().items()})
    return model.eval()


def tokenizer(case: str, *, packed: bool) -> TextTokenizer:
    pairs = small_tokenizer()
    if case in WITH_TYPES:
        pairs.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        pairs.init_kwargs["model_input_names"] = pairs.model_input_names  # which are saved
    layout = PairLayout(pairs, read_pair_format(open_model_source(reranker(case)), pairs))
    return TextTokenizer(pairs, 48, layout, packed=packed)


PAIRS = [Pair(text(seed, 1 + seed % 4), text(9 + seed, length)) for seed, length in enumerate((30, 19, 19, 4, 1))]


def grads(module: torch.nn.Module, scores: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    (scores[:, 0] * torch.arange(1.0, len(scores) + 1)).sum().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_those_of_the_whole_class(case):
    encoder = build(case)
    reference = whole_class(encoder)
    prefix = reference.base_model_prefix
    (padded,) = tokenizer(case, packed=False).chunks(PAIRS, 10_000)
    types = {} if padded.types is None else {"token_type_ids": padded.types}
    assert (padded.types is not None) == has_token_types(encoder) == (case in WITH_TYPES)
    expected = reference(input_ids=padded.ids, attention_mask=padded.mask, **types).logits
    expected_grads = grads(reference, expected)
    assert expected.std() > 0.01
    chunks = [padded]
    support = check_packing(encoder, precision=Precision.fp32, capability=CPU)
    assert (support.padding_reason is not None) == (case in PADDED)
    if case not in PADDED:
        enable_packing(encoder)
        chunks += tokenizer(case, packed=True).chunks(PAIRS, 10_000)
        head, backbone = encoder.output, encoder.backbone
        with encoder.computing(lambda chunk: head.compared(hidden_states(backbone, chunk), chunk)):
            mismatch = packing_mismatch(
                encoder, encoder.backbone.config, Precision.fp32, torch.device("cpu"), token_types=bool(types)
            )
        assert mismatch is None
    assert own_class_mismatch(encoder, torch.device("cpu")) is None
    for chunk in chunks:
        scores = encoder(chunk)[0]
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
        for name, grad in grads(encoder, scores).items():
            torch.testing.assert_close(grad, expected_grads[own_name(name, prefix)], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", ["xlm-roberta", "qwen3"])
def test_a_tokenizer_that_pads_on_the_left_scores_as_each_pair_alone(case):
    """Positions count from the first token, and the score of a decoder is that of its last one."""
    encoder, pairs = build(case), tokenizer(case, packed=False)
    pairs.tokenizer.padding_side = "left"
    (chunk,) = pairs.chunks(PAIRS, 10_000)
    assert chunk.has_padding
    scores = restore_order([encoder(chunk)[0]], [chunk])
    reference = whole_class(encoder)
    alone = [reference(torch.tensor([tokens])).logits[0] for tokens in pairs.ids(PAIRS)]
    torch.testing.assert_close(scores, torch.stack(alone), rtol=1e-4, atol=1e-5)


def save_reranker(case: str, directory: Path) -> Path:
    """A directory as transformers writes a sequence classifier, with its tokenizer."""
    whole_class(build(case)).save_pretrained(directory)
    tokenizer(case, packed=False).tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("case", "modules"),
    [("bert", ["embeddings"]), ("xlm-roberta", []), ("distilbert", []), ("deberta-v2", []), ("modernbert", ["norms"]),
     ("qwen3", ["embeddings", "norms"])],
)  # fmt: skip
def test_peft_reads_adapters_with_the_head_and_ours_read_those_of_peft(case, modules, tmp_path):
    """Adapters and head on transformers' class of the base model, which PEFT opens by the adapter's task type."""
    base, encoder = build(case), build(case)
    adapted = add_adapters(encoder, LoraConfig(rank=2, modules_to_save=modules), None, torch.float32)
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.requires_grad:
                weight.copy_(0.2 * torch.randn_like(weight) + (0 if ".lora_" in name else weight))
    weights = {peft_key(encoder.stored_name(n)): w.detach() for n, w in encoder.named_parameters() if w.requires_grad}
    (tmp_path / "ours").mkdir()
    save_file(weights, tmp_path / "ours" / "adapter_model.safetensors")
    settings = adapter_settings(adapted.config) | {"base_model_name_or_path": "base"}
    (tmp_path / "ours" / "adapter_config.json").write_text(json.dumps(settings))
    (chunk,) = tokenizer(case, packed=False).chunks(PAIRS, 10_000)
    types = {} if chunk.types is None else {"token_type_ids": chunk.types}
    opened = PeftModel.from_pretrained(whole_class(base), str(tmp_path / "ours")).eval()
    scores = opened(input_ids=chunk.ids, attention_mask=chunk.mask, **types).logits
    assert (scores - base(chunk)[0]).abs().max() > 0.1
    torch.testing.assert_close(encoder(chunk)[0], scores, rtol=1e-4, atol=1e-5)
    layers = [n for n, part in base.named_modules() if isinstance(part, torch.nn.Linear) and n.startswith("backbone.")]
    targets = [base.stored_name(name) for name in layers]
    built = get_peft_model(whole_class(base), PeftLoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS"))
    with torch.no_grad():
        for weight in (w for w in built.parameters() if w.requires_grad):
            weight.normal_(std=0.2)
    built.save_pretrained(str(tmp_path / "theirs"))
    for directory, model in ((tmp_path / "ours", opened), (tmp_path / "theirs", built)):
        again = build(case)
        files = open_adapter(LoraConfig(path=str(directory)))
        assert files is not None
        assert files.has_head
        read = dict(initial_adapters(again, add_adapters(again, LoraConfig(), files, torch.float32), seed=0))
        again.load_state_dict(read, strict=False)
        expected = model.eval()(input_ids=chunk.ids, attention_mask=chunk.mask, **types).logits
        torch.testing.assert_close(again(chunk)[0], expected, rtol=1e-4, atol=1e-5)


def scores_of_directory(world: World, directory: Path, strategy: Strategy, lora: int) -> tuple[list[float], list[str]]:
    """Scores of PAIRS by a model that is sharded over the ranks, and the notes about it."""
    model = model_options(path=str(directory), kind="cross_encoder", lora=LoraConfig(rank=lora or None))
    loaded = load_model(model, parallel(strategy), world, seed=1)
    (chunk,) = loaded.tokenizer.chunks(PAIRS, 10_000)
    encoder = loaded.encoder.eval()
    assert loaded.tokenizer.packed == (chunk.packing is not None)
    assert (chunk.types is not None) == has_token_types(encoder)
    scores = encoder(chunk)[0].detach()
    if strategy is Strategy.fsdp:  # the gradient reaches every trained weight, the head's among them
        encoder(chunk)[0].sum().backward()
        assert all(weight.grad is not None for weight in encoder.parameters() if weight.requires_grad)
    order = torch.tensor(chunk.rows).argsort()
    return scores[order, 0].tolist(), list(loaded.notes)


@pytest.mark.quick("modernbert-fsdp-4")
@pytest.mark.parametrize(
    ("case", "strategy", "lora"),
    [("bert", Strategy.fsdp, 0), pytest.param("xlm-roberta", Strategy.ddp, 0, marks=pytest.mark.slow),
     ("modernbert", Strategy.fsdp, 4), ("qwen3", Strategy.fsdp, 0),
     pytest.param("deberta-v2", Strategy.fsdp, 0, marks=pytest.mark.slow)],
)  # fmt: skip
def test_scores_of_directories_equal_sentence_transformers(ranks, case, strategy, lora, tmp_path):
    classic = save_reranker(case, tmp_path / "classic")
    model = CrossEncoder_(str(classic), activation_fn=torch.nn.Identity(), device="cpu")
    expected = model.predict([pair[:2] for pair in PAIRS], show_progress_bar=False).tolist()
    model.save_pretrained(str(tmp_path / "modules"))
    for directory in (classic, tmp_path / "modules"):
        for scores, notes in ranks(2, scores_of_directory, directory, strategy, lora):
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
            assert any("score" in note for note in notes)
    source = open_model_source(model_options(path=str(tmp_path / "modules"), kind="cross_encoder"))
    assert source.kind.name == "cross_encoder"
    assert (source.settings.activation, source.settings.is_new) == ("torch.nn.modules.linear.Identity", False)


def save_linear(case: str, directory: Path, pooling: str = "lasttoken", **dense: Any) -> Path:
    """A CrossEncoder of sentence-transformers with a linear layer on a token vector."""
    backbone = save_small(reranker(case), directory / "backbone")
    settings = {"bias": False, "activation_function": torch.nn.Identity(), "module_output_name": "scores"} | dense
    modules = [Transformer(str(backbone), max_seq_length=48), StPooling(32, pooling), StDense(32, 1, **settings)]
    CrossEncoder_(modules=modules, device="cpu", activation_fn=torch.nn.Identity()).save_pretrained(
        str(directory / "ce")
    )
    return directory / "ce"


def test_a_linear_layer_on_the_last_token_is_the_head_of_a_decoder(ranks, tmp_path):
    directory = save_linear("qwen3", tmp_path)
    expected = CrossEncoder_(str(directory), device="cpu").predict(
        [pair[:2] for pair in PAIRS], show_progress_bar=False
    )
    assert np.ptp(expected) > 0.01
    for lora in (0, 2):  # read by ranks, and where adapters are added
        for scores, notes in ranks(2, scores_of_directory, directory, Strategy.fsdp, lora):
            torch.testing.assert_close(scores, expected.tolist(), rtol=1e-4, atol=1e-5)
            assert any("a score head on the last token" in note for note in notes)
    source = open_model_source(model_options(path=str(directory), kind="cross_encoder"))
    assert torch.equal(
        full_state_dict(source, seed=0)["head.score.weight"],
        load_file(directory / "2_Dense/model.safetensors")["linear.weight"],
    )
    with pytest.raises(ConfigError, match=r"reranker .*Dense.* model.kind=cross_encoder"):
        open_model_source(model_options(path=str(directory)))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("bert", {"pooling": "cls"}, r"cls token of bert; supported is the last token"),
        ("qwen3", {"pooling": "mean"}, r"mean token of qwen3"),
        ("qwen3", {"activation_function": torch.nn.Tanh()}, r"activation_function=.*Tanh"),
        ("qwen3", {"bias": True}, r"linear.bias"),
    ],
    ids=["encoder", "mean", "activation", "bias"],
)
def test_linear_layers_that_the_class_cannot_represent(tmp_path, case, changes, message):
    with pytest.raises(ModelError, match=message):
        open_model_source(model_options(path=str(save_linear(case, tmp_path, **changes)), kind="cross_encoder"))


def test_the_padding_side_of_a_decoder_changes_no_score(tmp_path):
    """Tokenizers of decoders often pad on the left; the score is that of the last token wherever the padding is."""
    encoder = build("qwen3")
    directory = save_reranker("qwen3", tmp_path / "model")
    scores = []
    for side in ("right", "left"):
        pairs = small_tokenizer()
        pairs.padding_side = pairs.init_kwargs["padding_side"] = side  # the second is saved
        pair_format = read_pair_format(open_model_source(reranker("qwen3")), pairs)
        (padded,) = TextTokenizer(pairs, 48, PairLayout(pairs, pair_format), packed=False).chunks(PAIRS, 10_000)
        scores.append(encoder(padded)[0][torch.tensor(padded.rows).argsort(), 0])
        pairs.save_pretrained(directory)
        theirs = CrossEncoder_(str(directory), device="cpu", activation_fn=torch.nn.Identity())
        assert theirs.tokenizer.padding_side == side
        expected = theirs.predict([(pair.query, pair.document) for pair in PAIRS], convert_to_tensor=True)
        torch.testing.assert_close(scores[-1], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(*scores)


@pytest.mark.parametrize("sizes", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_an_embedding_model_gives_its_backbone(ranks, minilm_dir, sizes):
    answers = [answer for size in sizes for answer in ranks(size, scores_of_directory, minilm_dir, Strategy.ddp, 0)]
    scores, notes = answers[0]
    assert all(other == pytest.approx(scores, rel=1e-4, abs=1e-6) for other, _ in answers)
    assert any("embedding model" in note for note in notes)


def test_other_classifiers_are_rejected(tmp_path):
    directory = save_reranker("bert", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"id2label": {0: "a", 1: "b"}}))
    with pytest.raises(ModelError, match=r"config.json.* 2 labels"):
        open_model_source(model_options(path=str(directory), kind="cross_encoder"))
    with pytest.raises(ConfigError, match=r"model.kind=cross_encoder|model.pooling"):
        open_model_source(model_options(path=str(directory)))


def save_classifier(case: str, directory: Path, num_labels: int, **config: Any) -> Path:
    """A classifier of several labels as transformers writes it, with its tokenizer."""
    settings = copy.deepcopy(build(case).backbone.config)
    settings.num_labels = num_labels
    settings.update(config)
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(directory)
    tokenizer(case, packed=False).tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("case", "num_labels", "labels"),
    [("bert", 2, [1, 0]), ("roberta", 3, [2, 0]), ("electra", 2, [0, 1]), ("deberta-v2", 3, [1]),
     ("modernbert, mean", 2, [1, 0]), ("eurobert", 2, [1, 0]), ("qwen3", 2, [1, 0])],
)  # fmt: skip
def test_the_logits_of_two_labels_are_one_score(case, num_labels, labels, tmp_path):
    """As sentence-transformers and transformers compute the logits; a new class of one label, with its sigmoid."""
    directory = save_classifier(case, tmp_path, num_labels, problem_type="single_label_classification")
    model = model_options(path=str(directory), kind="cross_encoder", score_labels=labels)
    source = open_model_source(model)
    encoder = assemble_encoder(source).eval()
    encoder.load_state_dict(full_state_dict(source, seed=0))
    assert source.kind.name == "cross_encoder"
    assert (source.settings.activation, source.settings.is_new) == (SIGMOID, False)
    assert (source.config.num_labels, source.config.problem_type) == (1, None)
    logits = CrossEncoder_(str(directory), device="cpu").predict(
        [pair[:2] for pair in PAIRS], activation_fn=torch.nn.Identity(), show_progress_bar=False, convert_to_tensor=True
    )
    expected = logits[:, labels[0]] - (logits[:, labels[1]] if len(labels) > 1 else 0)
    (chunk,) = tokenizer(case, packed=False).chunks(PAIRS, 10_000)
    with torch.no_grad():
        scores = encoder(chunk)[0][torch.tensor(chunk.rows).argsort(), 0]
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    if num_labels == 2:
        torch.testing.assert_close(scores.sigmoid(), logits.softmax(dim=1)[:, labels[0]], rtol=1e-4, atol=1e-5)
    assert float(expected.max() - expected.min()) > 1e-3


def test_labels_that_cannot_be_used_are_rejected(tmp_path):
    directory, one = save_classifier("bert", tmp_path / "two", 2), save_reranker("bert", tmp_path / "one")
    plain = save_small(small_model("bert"), tmp_path / "plain")
    for path, labels, error, message in (
        (directory, [2, 0], ConfigError, r"model\.score_labels=\[2,0\]: .* labels 0 to 1"),
        (one, [1, 0], ConfigError, r"model\.score_labels=\[1,0\]: .*without several labels; leave it out"),
        (plain, [1, 0], ConfigError, r"model\.score_labels=\[1,0\]: .*without several labels; leave it out"),
        (directory, None, ModelError, r"2 labels.*set model\.score_labels=\[1,0\]"),
    ):
        with pytest.raises(error, match=message):
            open_model_source(model_options(path=str(path), kind="cross_encoder", score_labels=labels))


def test_a_class_whose_logits_are_not_linear_in_the_labels_is_rejected(tmp_path, monkeypatch):
    """As one of a model's own code may be."""
    directory = save_classifier("bert", tmp_path, 2)
    forward = BertForSequenceClassification.forward

    def softmax(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.softmax(-1) if self.num_labels > 1 else output.logits
        return output

    monkeypatch.setattr(BertForSequenceClassification, "forward", softmax)
    model = model_options(path=str(directory), kind="cross_encoder", score_labels=[1, 0])
    with pytest.raises(ModelError, match=r"model\.score_labels=\[1,0\]: .* another way"):
        full_state_dict(open_model_source(model), seed=0)


def edited(directory: Path, target: Path, **config: Any) -> ModelConfig:
    """A copy with other values in config.json, as options of a cross-encoder."""
    shutil.copytree(directory, target)
    settings = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(settings))
    return model_options(path=str(target), kind="cross_encoder")


def test_activations_that_directories_name(tmp_path):
    bert, identity = save_reranker("bert", tmp_path / "bert"), "torch.nn.modules.linear.Identity"
    cases = {
        "current": ({"sentence_transformers": {"activation_fn": identity}}, identity),
        "before version 4": ({"sbert_ce_default_activation_function": identity}, identity),
        "code": ({"sentence_transformers": {"activation_fn": "evil.Function"}}, SIGMOID),
        "none": ({}, SIGMOID),
    }
    for name, (config, expected) in cases.items():
        head = open_model_source(edited(bert, tmp_path / name, **config)).settings
        assert head is not None
        assert head.activation == expected
    with pytest.raises(ModelError, match="classifier_pooling=late"):
        open_model_source(edited(save_reranker("eurobert", tmp_path / "e"), tmp_path / "l", classifier_pooling="late"))
    with pytest.raises(ModelError, match="3 labels"):
        open_model_source(edited(bert, tmp_path / "three", id2label={"0": "a", "1": "b", "2": "c"}))
    unheaded = save_small(small_model("bert"), tmp_path / "backbone")
    claims = open_model_source(
        edited(unheaded, tmp_path / "claims", architectures=["BertForSequenceClassification"], id2label={"0": "a"})
    )
    with pytest.raises(ModelError, match="classifier"):
        full_state_dict(claims, seed=0)


def test_a_new_head_is_a_function_of_the_seed_and_the_backbone_is_read(tmp_path):
    backbone = save_small(small_model("xlm-roberta"), tmp_path)
    source = open_model_source(model_options(path=str(backbone), kind="cross_encoder"))
    assert source.kind.name == "cross_encoder"
    assert source.settings.is_new
    first, again, other = (full_state_dict(source, seed) for seed in (0, 0, 1))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        is_read = name.startswith("backbone.") or name.endswith("bias")
        assert torch.equal(weight, other[name]) == is_read, name


def sharded_step(world: World, directory: Path, options: ParallelConfig, expected: dict[str, Tensor]) -> None:
    """The gradient on several ranks; in bf16 the head still computes in float32; adapters train the head as well."""
    model = model_options(path=str(directory), kind="cross_encoder")
    loaded = load_model(model, options, world, seed=0)
    assert loaded.layout.activation_checkpointing == bool(options.activation_checkpointing)
    encoder = loaded.encoder.eval()
    (chunk,) = loaded.tokenizer.chunks(PAIRS, 10_000)
    actual = grads(encoder, encoder(chunk)[0])
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        torch.testing.assert_close(grad.full_tensor(), expected[name], rtol=1e-3, atol=1e-5, msg=name)
    model.lora = LoraConfig(rank=2)
    encoder = load_model(model, replace(options, precision=Precision.bf16), world, seed=0).encoder.eval()
    scores = encoder(chunk)[0]
    assert not torch.equal(scores, scores.bfloat16().float())
    trained = {name for name, _ in grads(encoder, scores).items()}
    assert {name for name in trained if ".lora_" not in name} == {name for name in expected if name.startswith("head.")}


HSDP = parallel(Strategy.hsdp, shard_size=2, activation_checkpointing=True)


@pytest.mark.parametrize(
    ("case", "size", "options"),
    [
        pytest.param("bert", 4, HSDP, marks=pytest.mark.slow),
        ("albert", 2, parallel(activation_checkpointing=True)),
        pytest.param("bert", 2, parallel(), marks=pytest.mark.slow),
        pytest.param("bert", 2, parallel(Strategy.ddp), marks=pytest.mark.slow),
        pytest.param("qwen3", 4, HSDP, marks=pytest.mark.slow),
        pytest.param("modernbert", 2, parallel(Strategy.ddp, activation_checkpointing=True), marks=pytest.mark.slow),
        pytest.param("deberta-v2", 4, HSDP, marks=pytest.mark.slow),
    ],
    ids=["hsdp", "shared layers", "fsdp", "ddp", "decoder", "recomputed", "padded"],
)
def test_a_sharded_reranker_has_the_gradient_of_one_process(ranks, case, size, options, tmp_path):
    directory = save_reranker(case, tmp_path)
    encoder = build(case)
    source = open_model_source(model_options(path=str(directory), kind="cross_encoder"))
    encoder.load_state_dict(full_state_dict(source, seed=0))
    (chunk,) = tokenizer(case, packed=False).chunks(PAIRS, 10_000)
    ranks(size, sharded_step, directory, options, grads(encoder, encoder(chunk)[0]))


def test_the_template_of_a_decoder_survives_truncation():
    template = {"prefix": "alpha ", "query": "beta {query} mu ", "document": "gamma {document}", "suffix": " mu nu"}
    model, words = replace(reranker("qwen3"), pair_template=template), small_tokenizer()
    read = read_pair_format(open_model_source(model), words)
    pairs = TextTokenizer(words, 24, PairLayout(words, read))
    (short, long) = pairs.ids([Pair("zeta", "nu"), Pair("zeta", "nu " * 40)])
    assert words.convert_ids_to_tokens(short) == [
        "<s>",
        "alpha",
        "beta",
        "zeta",
        "mu",
        "gamma",
        "nu",
        "mu",
        "nu",
        "</s>",
    ]
    assert len(long) == 24
    assert long[-3:] == short[-3:]
    with pytest.raises(ConfigError, match=r"model\.pair_template"):
        read_pair_format(open_model_source(replace(reranker("bert"), pair_template=model.pair_template)), words)
    bare = small_tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    with pytest.raises(ConfigError, match=r"model\.pair_template=null"):
        read_pair_format(open_model_source(reranker("qwen3")), bare)


def test_a_classifier_with_a_transformer_module_alone_is_a_reranker(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}')
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for more, kind in ((), "cross_encoder"), (("Pooling",), "dense"):
        entries = [
            {"idx": 1, "name": "1", "path": name, "type": f"sentence_transformers.models.{name}"} for name in more
        ]
        (tmp_path / "modules.json").write_text(json.dumps(modules + entries))
        assert kind_of_files(tmp_path)[0].name == kind
