"""Directories with exactly the files of published models, written by old and new versions of other libraries."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoConfig, AutoModelForSequenceClassification

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.flag_embedding import write_m3_layer
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.models.build import assemble_encoder, full_state_dict, head_weights, locate_weights
from tests.small import model_options, save_small, small_model, small_tokenizer

TEXTS = ["alpha beta", "gamma a b c d e"]
OLD, TANH = "sentence_transformers.models.", "torch.nn.modules.activation.Tanh"
FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
NEW_TYPES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(directory: Path, *kinds: str, types: dict[str, str] | None = None, first: str = "") -> None:
    entries = []
    for index, kind in enumerate(kinds):
        path = f"{index}_{kind}" if index else first
        (directory / path).mkdir(exist_ok=True)
        name = (types or {}).get(kind, OLD + kind)
        entries.append({"idx": index, "name": str(index), "path": path, "type": name})
    write(directory / "modules.json", entries)


def write_pooling(directory: Path, mode: str, **more: Any) -> None:
    flags = {f"pooling_mode_{flag}": flag.startswith(mode) and flag != "mean_sqrt_len_tokens" for flag in FLAGS}
    write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 32} | flags | more)


def write_length(directory: Path, **more: Any) -> None:
    write(directory / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False} | more)


def pickle_weights(directory: Path) -> None:
    """Only `pytorch_model.bin`, as before safetensors."""
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def mpnet_of_2021(directory: Path) -> None:
    """all-mpnet-base-v2: settings without prompts, and pickled weights."""
    save_small(small_model("mpnet"), directory)
    pickle_weights(directory)
    write_modules(directory, "Transformer", "Pooling", "Normalize")
    write_pooling(directory, "mean")
    write_length(directory)
    write(directory / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "2.0.0"}})


def labse(directory: Path, *, pickled: bool = True) -> None:
    """LaBSE: a dense head with tanh, pickled, and a transformer in a folder of its own."""
    save_small(small_model("bert"), directory / "0_Transformer")
    if pickled:
        pickle_weights(directory / "0_Transformer")
    write_modules(directory, "Transformer", "Pooling", "Dense", "Normalize", first="0_Transformer")
    write_pooling(directory, "cls")
    write_length(directory / "0_Transformer")
    head = {"in_features": 32, "out_features": 16, "bias": True, "activation_function": TANH}
    write(directory / "2_Dense" / "config.json", head)
    torch.manual_seed(1)
    weights = {"linear.weight": torch.randn(16, 32), "linear.bias": torch.randn(16)}
    torch.save(weights, directory / "2_Dense" / "pytorch_model.bin")


def bce_embedding(directory: Path) -> None:
    """bce-embedding-base_v1: XLM-R with both kinds of weights."""
    save_small(small_model("xlm-roberta"), directory)
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    write_modules(directory, "Transformer", "Pooling", "Normalize")
    write_pooling(directory, "cls", pooling_mode_weightedmean_tokens=False, pooling_mode_lasttoken=False)
    write_length(directory)
    versions = {"sentence_transformers": "2.2.2", "transformers": "4.35.0", "pytorch": "1.13.1"}
    write(directory / "config_sentence_transformers.json", {"__version__": versions})


def bge_en_icl(directory: Path) -> None:
    """bge-en-icl: Mistral with the last token, and a tokenizer that does not end texts."""
    save_small(small_model("mistral"), directory)
    write_modules(directory, "Transformer", "Pooling", "Normalize")
    write_pooling(directory, "none", pooling_mode_lasttoken=True, include_prompt=True)
    write_length(directory)


def sgpt(directory: Path) -> None:
    """SGPT: the mean of the tokens with weights that grow with their positions."""
    save_small(small_model("llama"), directory)
    write_modules(directory, "Transformer", "Pooling", "Normalize")
    write_pooling(directory, "none", pooling_mode_weightedmean_tokens=True)
    write_length(directory)


def maximum(directory: Path) -> None:
    save_small(small_model("bert"), directory)
    write_modules(directory, "Transformer", "Pooling", "Normalize")
    write_pooling(directory, "max")
    write_length(directory)


def saved_by_version_6(directory: Path) -> None:
    """The names of modules and the pooling of sentence-transformers 6, whose length is in the tokenizer alone."""
    save_small(small_model("xlm-roberta"), directory)
    write_modules(directory, "Transformer", "Pooling", "Normalize", types=NEW_TYPES)
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    write(directory / "1_Pooling" / "config.json", pooling)
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {"transformer_task": "feature-extraction", "modality_config": {"text": output}}
    write(directory / "sentence_bert_config.json", settings | {"module_output_name": "token_embeddings"})
    content = {"model_type": "SentenceTransformer", "prompts": {"query": "", "document": ""}}
    write(directory / "config_sentence_transformers.json", content | {"similarity_fn_name": "cosine"})


def bge_m3(directory: Path) -> None:
    """BGE-M3: the linear layers of FlagEmbedding beside a directory of sentence-transformers."""
    bce_embedding(directory)
    layers = {"colbert_linear": torch.nn.Linear(32, 8), "sparse_linear": torch.nn.Linear(32, 1)}
    for name, layer in layers.items():
        write_m3_layer(directory / f"{name}.pt", layer.state_dict())


EMBEDDERS: dict[str, tuple[Callable[[Path], None], Pooling, int | None]] = {
    "all-mpnet-base-v2": (mpnet_of_2021, Pooling.mean, 24),
    "LaBSE": (labse, Pooling.cls, 24),
    "bce-embedding-base_v1": (bce_embedding, Pooling.cls, 24),
    "bge-en-icl": (bge_en_icl, Pooling.last, 24),
    "SGPT": (sgpt, Pooling.weighted_mean, 24),
    "maximum": (maximum, Pooling.max, 24),
    "bge-m3 as one vector": (bge_m3, Pooling.cls, 24),
    "sentence-transformers 6": (saved_by_version_6, Pooling.mean, None),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(tmp_path, name):
    save, pooling, max_length = EMBEDDERS[name]
    save(tmp_path)
    source = open_model_source(model_options(path=str(tmp_path)))
    assert (source.vectors.pooling, source.vectors.normalize, source.tokenization.max_length) == (
        pooling,
        True,
        max_length,
    )
    assert not any(source.prompts.values())
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    tokens = load_tokenizer(source)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        vectors = encoder.eval()(Chunk(tokens["input_ids"], tokens["attention_mask"]))[0]
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


def test_three_representations_of_bge_m3(tmp_path):
    bge_m3(tmp_path)
    source = open_model_source(model_options(path=str(tmp_path), kind="m3"))
    assert source.kind.name == "m3"
    assert (source.settings.token_dimension, source.has_new_head) == (8, False)


def test_scores_of_bge_and_bce_rerankers(tmp_path):
    """A directory of transformers 4 without a file of sentence-transformers."""
    values = dict(small_model("xlm-roberta").config)
    config = AutoConfig.for_model(values.pop("model_type"), **values, num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    pickle_weights(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    older = {"torch_dtype": "float32", "transformers_version": "4.35.0", "position_embedding_type": "absolute"}
    write(tmp_path / "config.json", {name: value for name, value in content.items() if name != "dtype"} | older)
    source = open_model_source(model_options(path=str(tmp_path), kind="cross_encoder"))
    assert source.kind.name == "cross_encoder"
    assert not source.settings.is_new
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    tokens = load_tokenizer(source)([TEXTS[0]], [TEXTS[1]], return_tensors="pt")
    with torch.no_grad():
        score = encoder.eval()(Chunk(tokens["input_ids"], tokens["attention_mask"]))[0]
    model = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    assert score.item() == pytest.approx(float(model.predict([tuple(TEXTS)])[0]), abs=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "WeightedLayerPooling", "CNN", "BoW", "WordEmbeddings"])
def test_modules_that_are_not_supported_are_named(tmp_path, kind):
    bce_embedding(tmp_path)
    write_modules(tmp_path, "Transformer", kind, "Pooling")
    with pytest.raises(ModelError, match=f"unknown module type sentence_transformers.models.{kind}; supported are"):
        open_model_source(model_options(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mean_sqrt_len_tokens": True}, "has the pooling mean_sqrt_len_tokens; supported are cls, mean"),
        ({"mean_tokens": True, "max_tokens": True}, r"has the pooling mean \+ max; supported are"),
        ({"weightedmean_tokens": True, "x": False}, r"1_Pooling/config\.json: include_prompt=false"),
    ],
)
def test_poolings_that_are_not_supported_are_named(tmp_path, more, message):
    bce_embedding(tmp_path)
    flags = {f"pooling_mode_{mode}": value for mode, value in more.items()}
    write_pooling(tmp_path, "none", **flags, include_prompt="x" not in more)
    with pytest.raises(ModelError, match=message):
        open_model_source(model_options(path=str(tmp_path)))


def test_a_weighted_mean_counts_the_prompt(tmp_path):
    bce_embedding(tmp_path)
    write_pooling(tmp_path, "mean", include_prompt=False)
    with pytest.raises(ConfigError, match=r"model\.pooling=weighted_mean: .*include_prompt=true"):
        open_model_source(model_options(path=str(tmp_path), pooling=Pooling.weighted_mean))
    options = model_options(path=str(tmp_path), pooling=Pooling.weighted_mean, include_prompt=True)
    with pytest.raises(ConfigError, match="include_prompt"):
        open_model_source(replace(options, include_prompt=False))
    assert open_model_source(options).vectors.include_prompt is True


def test_a_folder_of_a_copied_directory_is_enough(tmp_path):
    """Only the files that a model needs: no tokenizer_config.json, special_tokens_map.json or settings."""
    bce_embedding(tmp_path / "whole")
    needed = ("config.json", "pytorch_model.bin", "tokenizer.json", "tokenizer_config.json")
    (tmp_path / "part").mkdir()
    for name in needed:
        shutil.copy(tmp_path / "whole" / name, tmp_path / "part" / name)
    source = open_model_source(model_options(path=str(tmp_path / "part"), pooling=Pooling.cls))
    whole = open_model_source(model_options(path=str(tmp_path / "whole")))
    state, expected = (full_state_dict(each, seed=0) for each in (source, whole))
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weights", [{"linear.weight": torch.zeros(16, 31)}, {"linear.weight": "none"}, [1]])
def test_a_pickled_head_with_something_else_is_rejected(tmp_path, weights):
    labse(tmp_path)
    torch.save(weights, tmp_path / "2_Dense" / "pytorch_model.bin")
    source = open_model_source(model_options(path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"2_Dense/pytorch_model\.bin (should|must) contain"):
        full_state_dict(source, seed=0)


def test_a_pickled_head_beside_safetensors_is_read_in_slices(tmp_path):
    labse(tmp_path, pickled=False)
    source = open_model_source(model_options(path=str(tmp_path)))
    shapes = {name: tensor.shape for name, tensor in assemble_encoder(source).state_dict().items()}
    locations, heads = locate_weights(source, shapes), head_weights(source)
    assert locations is not None
    assert heads.keys() == {"dense.0.linear.weight", "dense.0.linear.bias"}
    assert locations.keys() | heads.keys() == shapes.keys()
