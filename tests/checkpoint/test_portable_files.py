"""Exported configurations and tokenizers have the fields that transformers 4 and serving engines read."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import write_config, write_rope_theta, write_tokenizer
from tests.small import ARCHITECTURES, small_model, small_tokenizer

LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 77.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LAYERS = {
    "full_attention": {"rope_type": "default", "rope_theta": 44.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}


def exported_config(folder, architecture, **changes):
    model = small_model(architecture)
    source = open_model_source(small_model(architecture, config=model.config | changes))
    write_config(folder, source.config)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_names_the_class_of_the_weights(tmp_path, architecture):
    (name,) = exported_config(tmp_path, architecture, architectures=["SomethingForCausalLM"])["architectures"]

    class_names = {"xlm-roberta": "XLMRobertaModel", "gemma3_text": "Gemma3TextModel", "modernbert": "ModernBertModel"}
    assert name == class_names.get(architecture, f"{architecture.capitalize()}Model")


def test_rotary_positions_have_the_names_of_transformers_4_as_well(tmp_path):
    llama = exported_config(tmp_path / "llama", "llama", rope_parameters=LLAMA_3)
    assert llama["rope_theta"] == 77.0
    assert llama["rope_scaling"] == {name: value for name, value in LLAMA_3.items() if name != "rope_theta"}
    assert llama["rope_parameters"] == LLAMA_3
    assert "rope_scaling" not in exported_config(tmp_path / "qwen3", "qwen3")
    modernbert = exported_config(tmp_path / "modernbert", "modernbert", rope_parameters=LAYERS)
    assert (modernbert["global_rope_theta"], modernbert["local_rope_theta"]) == (44.0, 20.0)
    scaled = LAYERS | {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 44.0}}
    gemma = exported_config(tmp_path / "gemma", "gemma3_text", rope_parameters=scaled)
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"]) == (44.0, 20.0)
    assert gemma["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_settings_that_transformers_5_dropped_and_engines_require(tmp_path):
    assert exported_config(tmp_path / "roberta", "xlm-roberta")["position_embedding_type"] == "absolute"  # vLLM
    assert exported_config(tmp_path / "modernbert", "modernbert", norm_eps=3e-6)["layer_norm_eps"] == 3e-6  # llama.cpp


@pytest.mark.parametrize("splits", [True, False])
def test_llama_cpp_reads_whether_a_unigram_tokenizer_drops_spaces(tmp_path, splits):
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    metaspace = pre_tokenizers.Metaspace()
    unigram.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace]) if splits else metaspace
    )
    write_tokenizer(tmp_path, PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>"), 7)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings.get("clean_up_tokenization_spaces", False) is splits


def test_gemma_has_the_names_of_transformers_4_only(tmp_path):
    """text-embeddings-inference does not start with rotary parameters of layers."""
    scaled = LAYERS | {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 44.0}}
    assert "rope_parameters" not in exported_config(tmp_path, "gemma3_text", rope_parameters=scaled)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == scaled
    write_rope_theta(tmp_path, 66.0)
    changed = scaled | {"full_attention": scaled["full_attention"] | {"rope_theta": 66.0}}
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == changed
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())


def test_layers_with_full_attention_have_a_distance(tmp_path):
    layers = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    regular = exported_config(tmp_path / "regular", "modernbert", num_hidden_layers=6, layer_types=layers)
    assert regular["global_attn_every_n_layers"] == 3
    irregular = exported_config(tmp_path / "other", "modernbert", num_hidden_layers=6, layer_types=layers[::-1])
    assert "global_attn_every_n_layers" not in irregular


def test_tokenizer_files_cut_texts_at_the_length_of_the_model(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<extra>"]})
    tokenizer(["alpha", "alpha beta"], truncation=True, max_length=40, padding="max_length")

    write_tokenizer(tmp_path, tokenizer, 7)

    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("alpha " * 20).ids) == 7
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 7
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<extra>"]
    assert settings.keys().isdisjoint({"extra_special_tokens", "max_length", "backend", "is_local"})
    assert json.loads((tmp_path / "special_tokens_map.json").read_text())["pad_token"] == "<pad>"
    reopened = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["alpha <extra>", "alpha " * 20]
    assert reopened(texts)["input_ids"] == tokenizer(texts, truncation=False)["input_ids"]
    assert reopened.model_input_names == tokenizer.model_input_names
