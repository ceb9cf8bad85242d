"""BGE-M3: the three representations, its files, and which of them are rejected."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from embedtrain.config.recipe import LoraConfig, ModelConfig, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.flag_embedding import LAYERS, write_m3_layer
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.m3.model import M3Head, M3Layout
from embedtrain.models.adapters import add_adapters
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict, head_weights, locate_weights
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from tests.small import model_options, save_guide, save_small, small_model, small_tokenizer, text

TEXTS = [text(seed, length) for seed, length in enumerate((30, 18, 9, 2))] + ["alpha beta alpha alpha"]


def m3_model(**options: object) -> ModelConfig:
    return small_model("xlm-roberta", kind="m3", **{"dimension": 8} | options)


def save_m3(directory: Path) -> tuple[Path, Encoder]:
    """A directory as FlagEmbedding writes it, and its encoder."""
    torch.manual_seed(0)  # whatever test ran before: a text whose lexical weights are all 0 has no cosine
    encoder = assemble_encoder(open_model_source(m3_model()))
    assert isinstance(encoder.output, M3Head)
    torch.nn.init.normal_(encoder.sparse_linear.weight, generator=torch.Generator().manual_seed(0))
    save_small(small_model("xlm-roberta"), directory)
    encoder.backbone.save_pretrained(directory)
    for name in LAYERS:
        write_m3_layer(directory / f"{name}.pt", getattr(encoder, name).state_dict())
    return directory, encoder.eval()


def opened(directory: Path, **options: object) -> ModelConfig:
    return model_options(path=str(directory), kind="m3", **options)


def flag_embedding(encoder: Encoder, ids: list[int]) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
    """The dense vector, lexical weights and token vectors of a text alone, as FlagEmbedding computes them."""
    hidden = encoder.backbone(input_ids=torch.tensor([ids])).last_hidden_state[0]
    weights = torch.relu(encoder.sparse_linear(hidden))[:, 0].tolist()
    tokenizer = small_tokenizer()
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    lexical: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in unused and weight > lexical.get(token, 0.0):
            lexical[token] = weight
    return F.normalize(hidden[0], dim=0), lexical, F.normalize(encoder.colbert_linear(hidden[1:]), dim=1)


@pytest.mark.parametrize("packed", [False, True])
def test_representations_are_those_of_flag_embedding(tmp_path, packed):
    _, encoder = save_m3(tmp_path / "model")
    tokenizer = TextTokenizer(small_tokenizer(), 48, M3Layout(small_tokenizer()), packed=packed)
    tokens = tokenizer.tokens(TEXTS)
    ids = tokens.lists()
    chunk = tokenizer.chunk(tokens, sorted(range(len(ids)), key=lambda row: -len(ids[row])))
    with torch.no_grad():
        expected = [flag_embedding(encoder, ids[row]) for row in chunk.rows]
        if packed:
            enable_packing(encoder)
        rows = encoder(chunk)[0]
    assert rows.shape == (sum(map(len, ids)), 33)  # of 32 dimensions, and a lexical weight
    sizes = chunk.sizes.tolist()
    for text_rows, row_ids, (dense, lexical, vectors) in zip(
        rows.split(sizes), chunk.row_ids.split(sizes), expected, strict=True
    ):
        torch.testing.assert_close(text_rows[0, :-1], dense, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(text_rows[1:, :8], vectors, rtol=1e-4, atol=1e-5)
        assert not text_rows[1:, 8:-1].any()
        weights = text_rows[:, -1].tolist()
        own = {token: weight for token, weight in zip(row_ids.tolist(), weights, strict=True) if weight > 0}
        assert own == pytest.approx(lexical, rel=1e-4, abs=1e-5)
        assert (text_rows[:, -1] > 0).sum() == len(own)  # one row per id


def test_files_are_read_by_ranks_and_by_transformers(tmp_path):
    directory, encoder = save_m3(tmp_path / "model")
    source = open_model_source(opened(directory))
    assert (source.kind.name, source.settings.token_dimension, source.has_new_head) == ("m3", 8, False)
    expected = encoder.state_dict()
    for name, tensor in full_state_dict(source, seed=5).items():
        torch.testing.assert_close(tensor, expected[name])
    shapes = {name: tensor.shape for name, tensor in build_encoder(source).state_dict().items()}
    locations, heads = locate_weights(source, shapes), head_weights(source)
    assert locations is not None and {*locations, *heads} == set(shapes) and not set(locations) & set(heads)


def test_new_layers_start_from_the_seed(tmp_path):
    directory = save_small(small_model("xlm-roberta"), tmp_path / "model")
    source = open_model_source(opened(directory, dimension=5))
    assert source.has_new_head and source.settings.token_dimension == 5
    first, second, other = (full_state_dict(source, seed)["colbert_linear.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


class Opener:
    def __reduce__(self):
        return open, ("/nonexistent/file", "w")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, r"has colbert_linear\.pt, but not sparse_linear\.pt"),
        (Opener(), r"sparse_linear\.pt cannot be read: .*more than tensors"),
        ({"weight": torch.zeros(1, 32)}, r"sparse_linear\.pt must contain the tensors weight and bias"),
        ({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, r"sparse_linear\.pt: weight \[1, 5\]"),
        ({"weight": torch.full((1, 32), torch.nan), "bias": torch.zeros(1)}, r"sparse_linear\.pt: 'weight' .*finite"),
        ({"weight": torch.zeros(2, 32), "bias": torch.zeros(2)}, r"sparse_linear\.pt: .*\[2, 32\]; expected \[1, 32\]"),
    ],
    ids=["missing", "code", "no bias", "size", "nan", "outputs"],
)
def test_damaged_layers_are_rejected(tmp_path, state, message):
    directory, _ = save_m3(tmp_path / "model")
    path = directory / "sparse_linear.pt"
    path.unlink()
    if isinstance(state, Opener):
        path.write_bytes(pickle.dumps(state, protocol=2))
    elif state is not None:
        torch.save(state, path)
    with pytest.raises(ModelError, match=message):
        open_model_source(opened(directory))


def test_options_that_do_not_fit_the_files_are_rejected(tmp_path):
    directory, _ = save_m3(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.dimension=9: .*colbert_linear\.pt has 8"):
        open_model_source(opened(directory, dimension=9))


def test_an_embedding_model_of_another_pooling_is_only_the_backbone(tmp_path):
    mean = save_guide(small_model("xlm-roberta"), tmp_path / "mean")
    source = open_model_source(opened(mean, dimension=5))
    assert source.has_new_head
    assert source.vectors.pooling is Pooling.cls
    directory, _ = save_m3(tmp_path / "model")
    for layer in LAYERS:
        shutil.copy(directory / f"{layer}.pt", mean)
    with pytest.raises(ModelError, match=r"modules\.json: model\.kind=m3 .*pooling cls.*remove both"):
        open_model_source(opened(mean))


def test_tokenizers_without_special_tokens_are_rejected():
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(ConfigError, match=r"model\.kind=m3: .* two tokens"):
        TextTokenizer(tokenizer, 16, M3Layout(tokenizer))


def test_both_layers_are_trained_beside_adapters():
    encoder = assemble_encoder(open_model_source(m3_model()))
    adapted = add_adapters(encoder, LoraConfig(rank=2), None, torch.float32)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    in_full = {name for name in trained if ".lora_" not in name}
    assert in_full == {f"{layer}.{name}" for layer in LAYERS for name in ("weight", "bias")} and in_full < trained
    assert set(adapted.heads) == set(LAYERS)
