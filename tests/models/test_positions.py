"""The most tokens of a text are those for which a model has positions, whatever it is called."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from embedtrain.models.rope import num_positions

SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24, "vocab_size": 90}


def config_of(architecture, **options):
    config = CONFIG_MAPPING[architecture](**options)
    for name, value in (SIZES | {"max_position_embeddings": 40, "attention_window": 4, "mask_token_id": 4}).items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


@pytest.mark.parametrize("padding", [1, 7])
@pytest.mark.parametrize(
    ("architecture", "counts_from_padding"),
    [
        ("roberta", True), ("xlm-roberta", True), ("mpnet", True), ("longformer", True), ("ibert", True),
        ("roberta-prelayernorm", True), ("markuplm", True), ("esm", True), ("data2vec-text", True),
        ("bert", False), ("electra", False), ("distilbert", False), ("opt", False), ("nystromformer", False),
    ],
)  # fmt: skip
def test_texts_as_long_as_the_positions_are_encoded_and_longer_ones_are_not(architecture, counts_from_padding, padding):
    config = config_of(architecture, pad_token_id=padding)
    if architecture == "mpnet" and padding != 1:
        pytest.skip("its code has the padding id 1")
    length = num_positions(config)
    assert length == 40 - (padding + 1 if counts_from_padding else 0)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model(input_ids=torch.full((1, length), 9))
        if counts_from_padding:
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=torch.full((1, length + 1), 9))


def test_the_random_state_and_models_without_a_table_are_left_alone():
    state = torch.random.get_rng_state()
    assert num_positions(config_of("roberta", type_vocab_size=1)) == 38
    assert torch.equal(torch.random.get_rng_state(), state)
    assert num_positions(config_of("llama")) == 40  # rotary
    assert num_positions(config_of("bloom")) == 0
    assert num_positions(CONFIG_MAPPING["xlnet"]()) == 0
