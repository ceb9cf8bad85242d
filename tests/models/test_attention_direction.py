"""The direction of attention follows the options, with and without padding, in the model and in its export."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, PretrainedConfig

from embedtrain.config.recipe import ModelConfig, Pooling
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError
from embedtrain.formats.export_record import RECORD
from embedtrain.formats.source import open_model_source
from embedtrain.models.attention_direction import attends_to_later_tokens
from embedtrain.models.build import assemble_encoder
from tests.checkpoint.exporting import architecture_of, export_model
from tests.small import model_options, save_small, small_model, small_tokenizer

CPU = torch.device("cpu")
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
ENCODERS = ("bert", "xlm-roberta", "modernbert", "mpnet", "distilbert")
IDS = torch.tensor([[5, 9, 14, 20, 31, 7], [5, 9, 14, 20, 44, 7]])  # they differ in the fifth token
_WIDE = {"initializer_range": 0.5}  # weights of 0.1 would barely mix tokens


def model(architecture: str, **options: object) -> ModelConfig:
    small = small_model(architecture, **{"pooling": Pooling.mean, **options})
    small.config |= _WIDE
    return small


def depends_on_fifth(backbone: torch.nn.Module, *, padding: int) -> list[bool]:
    """Whether each token's vector depends on the fifth token."""
    ids = torch.cat([IDS, torch.full((2, padding), 1)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, IDS.shape[1] :] = 0
    with torch.no_grad():
        left, right = backbone(input_ids=ids, attention_mask=mask).last_hidden_state[:, : IDS.shape[1]]
    return [bool(change > 1e-6) for change in (left - right).norm(dim=-1)]


@pytest.mark.parametrize("bidirectional", [None, False, True])
@pytest.mark.parametrize("architecture", DECODERS)
def test_decoders_attend_in_the_configured_direction(architecture, bidirectional, tmp_path):
    torch.manual_seed(0)
    encoder = assemble_encoder(open_model_source(model(architecture, bidirectional=bidirectional))).eval()
    expected = [bool(bidirectional)] * 4 + [True, True]
    encoder.backbone.save_pretrained(tmp_path)
    for backbone in (encoder.backbone, AutoModel.from_pretrained(tmp_path)):
        for padding in (0, 3):
            assert depends_on_fifth(backbone, padding=padding) == expected
    assert attends_to_later_tokens(encoder, (5, 9, 14), CPU) is bool(bidirectional)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoders_are_always_bidirectional(architecture):
    torch.manual_seed(0)
    for bidirectional in (None, True):
        encoder = assemble_encoder(open_model_source(model(architecture, bidirectional=bidirectional))).eval()
        assert (
            depends_on_fifth(encoder.backbone, padding=0) == depends_on_fifth(encoder.backbone, padding=3) == [True] * 6
        )
        assert attends_to_later_tokens(encoder, (5, 9, 14), CPU) is True
    with pytest.raises(ConfigError, match=r"model\.bidirectional=false"):
        open_model_source(model(architecture, bidirectional=False))


def test_probe_works_with_any_pooling_and_detects_differences_with_padding():
    for pooling in Pooling:
        for bidirectional in (False, True):
            torch.manual_seed(0)
            encoder = assemble_encoder(open_model_source(model("llama", bidirectional=bidirectional))).eval()
            encoder.output.pooling = pooling
            assert attends_to_later_tokens(encoder, (5, 9, 14), CPU) is bidirectional
    # Gemma's own option has no effect with padding.
    torch.manual_seed(0)
    gemma = model("llama").config | {"model_type": "gemma", "head_dim": 16, "use_bidirectional_attention": True}
    ignored = open_model_source(model_options(config=gemma, pooling=Pooling.mean))
    assert attends_to_later_tokens(assemble_encoder(ignored).eval(), (5, 9, 14), CPU) is None
    del gemma["use_bidirectional_attention"]
    respected = open_model_source(model_options(config=gemma, pooling=Pooling.mean, bidirectional=True))
    assert attends_to_later_tokens(assemble_encoder(respected).eval(), (5, 9, 14), CPU) is True


@pytest.mark.parametrize("kind", ["sparse", "cross_encoder", "late_interaction"])
def test_the_direction_does_not_depend_on_what_is_made_of_the_vectors(kind):
    """The weights of a sparse model are maxima over all tokens, which depend on later ones in any direction."""
    for bidirectional in (False, True):
        torch.manual_seed(0)
        source = open_model_source(model("llama", bidirectional=bidirectional, kind=kind, pooling=None))
        encoder = assemble_encoder(source).eval()
        assert attends_to_later_tokens(encoder, (5, 9, 14), CPU) is bidirectional


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_direction_of_a_directory_is_kept_or_overridden(tmp_path, architecture):
    directory = tmp_path / architecture
    save_small(model(architecture), directory)
    source = open_model_source(model_options(path=str(directory), pooling=Pooling.mean, bidirectional=True))
    window = getattr(source.config, "sliding_window", None)
    source.config.save_pretrained(directory)
    for bidirectional, expected in ((None, True), (True, True), (False, False)):
        again = open_model_source(model_options(path=str(directory), pooling=Pooling.mean, bidirectional=bidirectional))
        torch.manual_seed(0)
        assert attends_to_later_tokens(assemble_encoder(again).eval(), (5, 9, 14), CPU) is expected
        if expected:
            assert getattr(again.config, "sliding_window", None) == window
            assert open_model_source(small_model(architecture)).config.sliding_window != window or window is None


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_bidirectional_export(tmp_path, architecture):
    directory = save_small(model(architecture), tmp_path / architecture)
    options = model_options(path=str(directory), pooling=Pooling.mean, bidirectional=True)
    exported = architecture_of(tmp_path / f"{architecture}-made", options)
    export_model(tmp_path / f"{architecture}-out", exported)  # reopened by both libraries and compared
    encode = SentenceTransformer(str(tmp_path / f"{architecture}-out"), device="cpu").encode
    torch.testing.assert_close(torch.tensor(encode(["alpha beta"])), vectors(exported, options, "alpha beta"))
    causal = architecture_of(
        tmp_path / f"{architecture}-causal", model_options(path=str(directory), pooling=Pooling.mean)
    )
    assert (causal.vectors - exported.vectors).norm(dim=1).max() > 0.01


def vectors(exported, options, text):
    encoder = assemble_encoder(open_model_source(options)).eval()
    encoder.load_state_dict(exported.state)
    ids = torch.tensor([small_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        return encoder(Chunk(ids, torch.ones_like(ids)))[0]


def test_decoder_without_bidirectional_support():
    mamba = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    with pytest.raises(ConfigError, match=r"model\.bidirectional=true: .* mamba"):
        open_model_source(model_options(config=mamba, pooling=Pooling.mean, bidirectional=True))
    open_model_source(model_options(config=mamba, pooling=Pooling.mean))


def test_cls_pooling_needs_bidirectional_attention(tmp_path):
    pattern = r"model\.pooling=cls: .* llama .* model\.pooling=last"
    with pytest.raises(ConfigError, match=pattern):
        open_model_source(small_model("llama", pooling=Pooling.cls))
    options = small_model("llama", pooling=Pooling.cls, bidirectional=True)
    assert open_model_source(options).vectors.pooling is Pooling.cls
    assert open_model_source(small_model("bert", pooling=Pooling.last)).vectors.pooling is Pooling.last
    # The pooling of a directory itself is accepted.
    directory = save_small(small_model("llama"), tmp_path / "llama")
    exported = architecture_of(tmp_path / "st", model_options(path=str(directory), pooling=Pooling.last))
    export_model(tmp_path / "out", exported)
    settings = (tmp_path / "out" / "1_Pooling" / "config.json").read_text()
    settings = settings.replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true')
    settings = settings.replace('"pooling_mode_lasttoken": true', '"pooling_mode_lasttoken": false')
    (tmp_path / "out" / "1_Pooling" / "config.json").write_text(settings)
    (tmp_path / "out" / RECORD).unlink()  # the checksums
    assert open_model_source(model_options(path=str(tmp_path / "out"))).vectors.pooling is Pooling.cls
    with pytest.raises(ConfigError, match=pattern):
        open_model_source(model_options(path=str(tmp_path / "out"), pooling=Pooling.cls))


@pytest.mark.parametrize("architecture", DECODERS)
def test_no_key_value_cache(architecture):
    """A cache would grow with every recomputed layer and cause IndexErrors."""
    small = small_model(architecture, pooling=Pooling.last)
    small.config["use_cache"] = True
    encoder = assemble_encoder(open_model_source(small)).eval()
    configs = {
        id(part.config): part.config
        for part in encoder.modules()
        if isinstance(getattr(part, "config", None), PretrainedConfig)
    }
    assert [config.use_cache for config in configs.values()] == [False] * len(configs)
    with torch.no_grad():
        output = encoder.backbone(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert list(output) == ["last_hidden_state"]
    encoder.train()
    assert list(encoder.backbone(input_ids=IDS, attention_mask=torch.ones_like(IDS))) == ["last_hidden_state"]
