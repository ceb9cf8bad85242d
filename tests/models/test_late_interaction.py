"""Vectors of tokens: packed and padded as from transformers' own class, whatever else a chunk holds."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from embedtrain.config.kind_settings import QueryExpansion
from embedtrain.config.recipe import LoraConfig, ModelConfig, Precision
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import NO_VECTOR, NOT_ATTENDED, Chunk, TextRole, Tokens
from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.late_interaction.model import TokenVectorHead, TokenVectorLayout, expansion_mismatch
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.encoded import Part
from embedtrain.models.adapters import add_adapters
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import check_packing, disable_packing, enable_packing, packing_mismatch
from tests.small import small_model, small_tokenizer, text

DEVICE = torch.device("cpu")
EXPANSION = {"query_expansion": QueryExpansion.min, "expansion_length": 20}
# Windows are shorter than expanded queries, and decoders attend to earlier tokens only.
ARCHITECTURES = {
    "bert": {},
    "xlm-roberta": {},
    "modernbert": {},
    "qwen2": {},
    "mistral": {"sliding_window": 6},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p"]},
}
QUERIES = [text(seed, length) for seed, length in enumerate((30, 18, 9, 9, 3, 1))]
DOCUMENTS = [text(seed, length) for seed, length in enumerate((40, 18, 9, 2, 1), start=10)]


def late_interaction(architecture: str, *, dropout: float = 0.0, **options: object) -> ModelConfig:
    model = small_model(architecture, dropout=dropout, kind="late_interaction", **{"dimension": 8} | options)
    return dataclasses.replace(model, config=model.config | ARCHITECTURES.get(architecture, {}))


def open_model(model: ModelConfig) -> tuple[Encoder, TextTokenizer]:
    source = open_model_source(model)
    torch.manual_seed(0)
    encoder = assemble_encoder(source).eval()
    assert isinstance(encoder.output, TokenVectorHead) and source.kind.name == "late_interaction"
    return encoder, TextTokenizer(small_tokenizer(), 48, TokenVectorLayout(small_tokenizer(), source.settings))


def all_tokens(tokenizer: TextTokenizer) -> Tokens:
    """Queries and documents, longest first, as in a training chunk."""
    tokens = Tokens.concatenated([tokenizer.tokens(QUERIES, role=TextRole.query), tokenizer.tokens(DOCUMENTS)])
    return tokens.take(np.argsort(-tokens.lengths, kind="stable"))


def rows_of(vectors: torch.Tensor, chunk: Chunk) -> dict[int, torch.Tensor]:
    """The vectors of each text."""
    return dict(zip(chunk.rows, vectors.split(chunk.sizes.tolist()), strict=True))


def own_class(encoder: Encoder, text: Tokens) -> torch.Tensor:
    """The vectors of one text from transformers' class with an attention mask."""
    mask, has_vector = (torch.from_numpy(text.flags & flag == 0) for flag in (NOT_ATTENDED, NO_VECTOR))
    inputs = torch.from_numpy(text.ids[None]).long()
    hidden = encoder.backbone(input_ids=inputs, attention_mask=mask[None].long()).last_hidden_state[0]
    return F.normalize(encoder.dense[0].linear(hidden)[has_vector], dim=-1)


@pytest.mark.parametrize(
    ("architecture", "attend"),
    # DeBERTa is rejected where expansion tokens are not attended to. Others pack attended ones as any text, which
    # test_packing.py shows.
    [*((name, False) for name in ARCHITECTURES if name != "deberta-v2"), ("bert", True), ("deberta-v2", True)],
)
def test_packed_and_padded_texts_have_the_vectors_of_transformers_class(architecture, attend):
    options = EXPANSION | {"attend_to_expansion_tokens": attend, "skiplist_words": ["alpha", "beta"]}
    encoder, tokenizer = open_model(late_interaction(architecture, **options))
    tokens = all_tokens(tokenizer)
    grads = []

    def compute(*, packed: bool) -> dict[int, torch.Tensor]:
        chunk = tokenizer.with_packing(packed).chunk(tokens, range(len(tokens)))
        vectors = encoder(chunk)[0]
        encoder.zero_grad()
        vectors.backward(torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1)))
        grads.append([parameter.grad for parameter in encoder.parameters() if parameter.grad is not None])
        return rows_of(vectors, chunk)

    computed = [compute(packed=False)]
    if architecture != "deberta-v2":  # its attention is its own, so it stays padded
        enable_packing(encoder)
        computed.append(compute(packed=True))
        torch.testing.assert_close(grads[0], grads[1], atol=2e-4, rtol=0)
        disable_packing(encoder)
    for number in range(len(tokens)):
        expected = own_class(encoder, tokens.take([number]))
        assert len(expected) == tokenizer.layout.num_vectors(tokens)[number]
        for rows in computed:
            torch.testing.assert_close(rows[number], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "modernbert", "qwen2"])
def test_packing_is_checked_with_expanded_queries(architecture, monkeypatch):
    source = open_model_source(late_interaction(architecture, **EXPANSION))
    encoder = assemble_encoder(source).eval()
    enable_packing(encoder)
    assert check_packing(encoder, precision=Precision.fp32, capability=(0, 0)).padding_reason is None

    def mismatch() -> str | None:
        return packing_mismatch(encoder, source.config, Precision.fp32, DEVICE, token_vectors=True)

    assert mismatch() is None
    # As where flash attention ignores the mask of padded queries.
    monkeypatch.setattr("embedtrain.models.packing._key_masks", lambda packing: [None] * len(packing.runs))
    assert "differ by" in str(mismatch())


def test_score_depends_on_no_other_text_of_its_chunk():
    """Zeroed padding would be the largest similarity of tokens that are unlike all others."""
    encoder, tokenizer = open_model(late_interaction("bert", **EXPANSION))

    def score(others: list[str], *, packed: bool) -> float:
        if packed:
            enable_packing(encoder)
        parts = []
        for texts, role in (([QUERIES[4], *others], TextRole.query), ([DOCUMENTS[3], *others], TextRole.document)):
            tokens = tokenizer.tokens(texts, role=role)
            chunk = tokenizer.with_packing(packed).chunk(tokens, range(len(tokens)))
            # Without a positive product, a vector of zeros would win.
            vectors = encoder(chunk)[0].abs() * (-1 if role is TextRole.query else 1)
            parts.append(Part(rows_of(vectors.detach(), chunk)[0], chunk.sizes[:1]))
        return float(MaxSim(mean=False).compare(*parts, torch.zeros(1, dtype=torch.int64), np.array([1])))

    alone = score([], packed=False)
    assert alone < -1
    for others in ([text(5, 40)], [text(6, 1), text(7, 20)]):
        for packed in (False, True):
            assert score(others, packed=packed) == pytest.approx(alone, rel=1e-5)


def test_lengths_of_queries_and_documents():
    _, tokenizer = open_model(late_interaction("bert", query_length=6, document_length=9))
    long = text(3, 40)
    query, document = tokenizer.ids([long], role=TextRole.query)[0], tokenizer.ids([long])[0]
    assert (len(query), len(document)) == (6, 9)
    assert query[-1] == document[-1] == tokenizer.tokenizer.eos_token_id
    assert len(tokenizer.ids([long], 4)[0]) == 4
    _, fixed = open_model(late_interaction("bert", query_expansion=QueryExpansion.fixed, expansion_length=8))
    queries = fixed.tokens([long, "alpha"], role=TextRole.query)
    assert queries.lengths.tolist() == [8, 8]
    first, second = queries.lists()
    assert first[-1] == 2 and second[2:] == [2] * 6  # without a mask token: end of text
    assert (queries.flags & NOT_ATTENDED > 0).tolist() == [False] * 11 + [True] * 5
    assert len(fixed.ids(["alpha"])[0]) == 3  # documents are never expanded


def test_skip_list_leaves_vectors_out_but_not_tokens():
    """A document of skipped tokens alone keeps its first vector, since a maximum over nothing is undefined."""
    words = ["alpha", "beta", "unknown"]
    encoder, tokenizer = open_model(late_interaction("bert", skiplist_words=words))
    (note,) = tokenizer.layout.notes
    assert note.endswith("1 of 3 words are no tokens and have no effect: unknown")
    texts = ["alpha gamma beta", "alpha alpha", "gamma unknown"]
    documents, queries = (tokenizer.tokens(texts, role=role) for role in (TextRole.document, TextRole.query))
    assert tokenizer.layout.num_vectors(documents).tolist() == [3, 2, 4]
    assert tokenizer.layout.num_vectors(queries).tolist() == [5, 4, 4]
    assert documents.lengths.tolist() == queries.lengths.tolist()
    chunk = tokenizer.chunk(documents, range(3))
    assert encoder(chunk)[0].shape == (9, 8) and chunk.sizes.tolist() == [3, 2, 4]
    bare = small_tokenizer()
    bare.backend_tokenizer.post_processor = None
    layout = TokenVectorLayout(bare, tokenizer.layout.token_vectors)
    assert layout.num_vectors(TextTokenizer(bare, 48, layout).tokens(["alpha beta"])).tolist() == [1]


def test_new_projection_starts_from_the_seed():
    source = open_model_source(late_interaction("bert"))
    first, again, other = (full_state_dict(source, seed)["dense.0.linear.weight"] for seed in (1, 1, 2))
    assert first.shape == (8, 32) and torch.equal(first, again) and not torch.equal(first, other)


def test_projection_is_trained_beside_adapters():
    encoder, _ = open_model(late_interaction("qwen2"))
    adapted = add_adapters(encoder, LoraConfig(rank=2), None, torch.float32)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert "dense.0.linear.weight" in trained and adapted.heads
    assert {name for name in trained if ".lora_" not in name} == {"dense.0.linear.weight"}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"expansion_token": "<nothing>"}, "expansion_token=<nothing>"),
        ({"expansion_length": 49}, "expansion_length=49.*48"),
    ],
)
def test_expansion_options_that_no_text_can_have(options, pattern):
    with pytest.raises(ConfigError, match=pattern):
        open_model(late_interaction("bert", **EXPANSION | options))


@pytest.mark.parametrize("architecture", ["bert", "qwen2", "deberta-v2"])
def test_attention_that_mixes_tokens_without_attention_with_padding_is_detected(architecture):
    """DeBERTa's mask hides such tokens from themselves, so that they attend to padding as well."""
    encoder, _ = open_model(late_interaction(architecture, **EXPANSION))
    assert (expansion_mismatch(encoder, DEVICE) is not None) is (architecture == "deberta-v2")


@pytest.mark.slow
def test_compiled_blocks_are_compiled_once_for_expanded_queries():
    encoder, tokenizer = open_model(late_interaction("modernbert", **EXPANSION))
    enable_packing(encoder)
    tokens = tokenizer.tokens(QUERIES, role=TextRole.query)
    chunks = [tokenizer.with_packing(True).chunk(tokens, rows) for rows in ([0, 2, 3], [1, 4, 5], [0, 1, 2, 3, 4, 5])]
    expected = [encoder(chunk)[0] for chunk in chunks]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in encoder.backbone.layers:
        block.compile(dynamic=True, backend="aot_eager")
    graphs = set()
    for chunk, vectors in zip(chunks, expected, strict=True):
        output = encoder(chunk)[0]
        output.sum().backward()
        torch.testing.assert_close(output, vectors, atol=1e-6, rtol=0)
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1
