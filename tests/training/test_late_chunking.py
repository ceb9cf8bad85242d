"""Late chunking through the whole step: the gradient of a document's chunks is that of the plain computation.

The reference is one process in float64: every document is encoded alone by transformers' class, its chunks are cut from
the hidden states with loops, and InfoNCE is written out.
"""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModel

from embedtrain.api import load_encoder
from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.config.recipe import GradientReduction, ModelConfig, Pooling, Strategy
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.row_checks import RowCheck
from embedtrain.data.images.item import chunks_of, join_chunks
from embedtrain.data.rows import Documents, Example
from embedtrain.data.sources import values
from embedtrain.data.sources.pictures import shown_item, written_item
from embedtrain.data.sources.values import BadRow
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import bound_tokenizer, load_model
from embedtrain.kinds.dense.model import ChunkedLayout
from embedtrain.kinds.dense.options import ChunkingOptions
from embedtrain.losses.build import build_loss
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.training.backward import Backward
from tests.runs import BASE, losses, run, run_without_base
from tests.small import model_options, parallel, save_small, small_model, small_tokenizer, text, tokenised
from tests.training.test_late_interaction import Result, assert_equal_gradients
from tests.training.test_losses import cut_for, whole

TEMPERATURE = 0.3
DROPOUT = "plain with dropout"
WAYS = [(10_000, 10_000, "plain"), (60, 0, "tiled"), (60, 90, "ring")]
DROPOUT_WAYS = [(60, 0, DROPOUT), (60, 10_000, DROPOUT)]


def document(seed: int, count: int, answers: tuple[int, ...] = ()) -> str:
    """A document in `count` chunks of 1 to 5 words."""
    return join_chunks([text(seed + 10 * i, 1 + (seed + i) % 5) for i in range(count)], answers)


@cache
def rows(num_rows: int) -> GlobalBatch:
    """Rows with documents of 1 to 4 chunks, and hard negatives in chunks, whole, or with one chunk that counts.

    Two rows share a document and ask for different chunks; of one row, two chunks answer; one chunk stands twice.
    """
    examples = []
    for i in range(num_rows):
        count = 1 + i % 4
        documents = [document(100 + i, count, (i % count,)), *(document(200 + i, n + 1) for n in range(i % 3))]
        examples.append(Example(text(i, 1 + i % 4), Documents(tuple(documents))))
    if num_rows > 5:
        examples[1] = Example(examples[1].query, Documents((document(103, 4, (3, 1)), text(7, 4))))
        examples[2] = Example(examples[2].query, Documents((document(103, 4, (0,)), document(205, 3, (2,)))))
        examples[4] = Example(examples[4].query, Documents((join_chunks(["mu nu", text(143, 4), "mu nu"], (0,)),)))
    return GlobalBatch(0, tuple(examples))


def opened(model: ModelConfig) -> tuple[torch.nn.Module, TextTokenizer]:
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    tokenizer = bound_tokenizer(source, small_tokenizer())
    assert isinstance(tokenizer.layout, ChunkedLayout)
    return encoder.double().eval(), tokenizer


def plain_vectors(backbone: torch.nn.Module, pooling: Pooling, item: str) -> list[Tensor]:
    """The vectors of a document's chunks by the definition."""
    tokenizer = small_tokenizer()
    ids, ends = [tokenizer.bos_token_id], [0]
    for chunk in chunks_of(item)[0]:
        ids += [*tokenizer(chunk, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ends.append(len(ids))
    inputs = torch.tensor([ids])
    hidden = backbone(input_ids=inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state[0]
    chunks = [hidden[start:end] for start, end in pairwise(ends)]
    return [F.normalize(chunk[-1] if pooling is Pooling.last else chunk.mean(0), dim=0) for chunk in chunks]


def plain_loss(model: ModelConfig, batch: GlobalBatch, negatives: bool) -> Result:
    """InfoNCE over the chunks of all documents. A chunk that equals a positive of the query is no negative."""
    encoder, _ = opened(model)
    candidates, texts, positives, queries = [], [], [], []
    for row in batch.rows:
        queries.append(plain_vectors(encoder.backbone, model.pooling, row.query)[0])
        for number, item in enumerate(row.documents.texts):
            chunks, answers = chunks_of(item)
            if number == 0:
                positives.append(len(candidates))
            chosen = list(range(len(chunks)))
            if answers:
                others = [i for i in chosen if i not in answers] if negatives else []
                chosen = (answers[:1] if number == 0 else answers) + others
            vectors = plain_vectors(encoder.backbone, model.pooling, item)
            candidates += [vectors[i] for i in chosen]
            texts += [chunks[i] for i in chosen]
    total = torch.zeros((), dtype=torch.float64)
    for i, (row, positive) in enumerate(zip(batch.rows, positives, strict=True)):
        right = {texts[p] for other, p in zip(batch.rows, positives, strict=True) if other.query == row.query}
        kept = [j for j, chunk in enumerate(texts) if j == positive or chunk not in right]
        logits = torch.stack([candidates[j] @ queries[i] for j in kept]) / TEMPERATURE
        total = total - F.log_softmax(logits, dim=0)[kept.index(positive)] / len(batch.rows)
    total.backward()
    return total.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def on_ranks(
    world: World, model: ModelConfig, batches: list[GlobalBatch], ways: list[tuple[int, int, str]], strategy: Strategy
) -> list[list[Result]]:
    """Loss and gradient of each batch, in each way."""
    options = parallel(strategy, gradient_reduction=GradientReduction.per_step)
    loaded = load_model(model, options, world, seed=0)
    results = []
    for rows_of_batch in batches:
        batch = tokenised(rows_of_batch, loaded.tokenizer)
        results.append([])
        for chunk_tokens, activation_tokens, implementation in ways:
            loaded.encoder.zero_grad(set_to_none=True)
            config = InfoNCEConfig(temperature=TEMPERATURE, implementation=Implementation(implementation.split()[0]))
            loss = build_loss(config, dimension=loaded.encoder.dimension, seed=0)
            loaded.encoder.train(implementation == DROPOUT)
            backward = Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy())
            output, finite = backward(cut_for(batch, world, loaded.tokenizer, chunk_tokens, activation_tokens))
            assert finite
            grads = whole({n: p.grad for n, p in loaded.encoder.named_parameters() if p.grad is not None})
            results[-1].append((sum(world.gather(output.local_loss.item())), grads))
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with dropout by architecture, pooling and whether other chunks are negatives."""
    folders = {}

    def make(architecture: str, *, negatives: bool = True) -> ModelConfig:
        small = small_model(architecture, dropout=0.2)
        if architecture not in folders:
            folders[architecture] = str(save_small(small, tmp_path_factory.mktemp(architecture)))
        chunking = ChunkingOptions(late=True, negatives=negatives)
        return model_options(path=folders[architecture], pooling=small.pooling, chunking=chunking)

    return make


@pytest.mark.parametrize(
    ("size", "architecture", "strategy", "negatives"),
    [
        pytest.param(1, "bert", Strategy.ddp, True, marks=pytest.mark.slow),
        (3, "bert", Strategy.fsdp, True),
        pytest.param(2, "bert", Strategy.fsdp, False, marks=pytest.mark.slow),
        pytest.param(2, "qwen3", Strategy.fsdp, True, marks=pytest.mark.slow),
        pytest.param(2, "modernbert", Strategy.ddp, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_chunks_have_the_gradient_of_one_process(ranks, models, size, architecture, strategy, negatives):
    """Of two rows on three ranks, one has none."""
    model = models(architecture, negatives=negatives)
    batches = [rows(2), rows(7)]
    results = ranks(size, on_ranks, model, batches, WAYS, strategy)[0]
    for batch, of_batch in zip(batches, results, strict=True):
        expected = plain_loss(model, batch, negatives)
        for result in of_batch:
            assert_equal_gradients(result, expected)


@pytest.mark.slow
def test_a_document_that_is_encoded_again_has_the_same_dropout(ranks, models):
    model = models("bert")
    (of_batch,) = ranks(2, on_ranks, model, [rows(7)], DROPOUT_WAYS, Strategy.fsdp)[0]
    encoded_twice, encoded_once = of_batch
    assert_equal_gradients(encoded_twice, encoded_once)
    assert encoded_once[0] != pytest.approx(plain_loss(model, rows(7), True)[0], rel=1e-3)


LIMIT = 20


def chunked_layout(*, include_prompt: bool = True) -> ChunkedLayout:
    return ChunkedLayout(small_tokenizer(), include_prompt=include_prompt)


def test_a_document_that_is_too_long_keeps_whole_chunks_around_the_one_that_answers():
    """`<s>`, the words of each chunk and `</s>` after it: 20 tokens are three chunks of five words."""
    layout = chunked_layout()
    chunks = [" ".join([word] * 5) for word in ("alpha", "beta", "gamma", "delta", "mu")]

    def kept(answers: list[int], prompt: str = "") -> str:
        (ids,) = layout.tokenize([prompt + join_chunks(chunks, answers)], LIMIT, prompt).lists()
        assert len(ids) <= LIMIT
        return layout.tokenizer.decode(ids)

    one = {
        number: " ".join([word] * 5) + " </s>" for number, word in enumerate(("alpha", "beta", "gamma", "delta", "mu"))
    }
    assert kept([]) == kept([1]) == f"<s> {one[0]} {one[1]} {one[2]}"
    assert kept([3]) == f"<s> {one[2]} {one[3]} {one[4]}"
    assert kept([4], "nu ") == f"<s> nu {one[3]} {one[4]}"
    (ids,) = layout.tokenize([join_chunks([chunks[0] * 9, "beta"])], LIMIT).lists()
    assert len(ids) == LIMIT


def test_prompt_tokens_are_of_the_first_chunk_or_of_none():
    item = join_chunks(["alpha beta", "gamma"], [1])
    for include_prompt, expected in ((True, [5, 2]), (False, [3, 2])):
        layout = chunked_layout(include_prompt=include_prompt)
        tokens = layout.tokenize([f"mu {item}", "mu nu"], LIMIT, "mu ")
        assert tokens.lists() == [[0, 15, 4, 5, 2, 6, 2], [0, 15, 16, 2]]
        for packed in (True, False):
            assert list(layout.chunk(tokens, [0, 1], packed=packed).segments.lengths[:2]) == expected


def test_windows_cover_all_chunks_and_repeat_as_many_as_fit():
    layout = chunked_layout()
    chunks = [text(number, 1 + number * 5 % 12) for number in range(30)]
    for overlap in (0, 1, 3):
        for prompt in ("", "alpha beta "):
            windows = layout.chunk_windows(chunks, LIMIT, prompt, overlap=overlap)
            assert windows[0].start == 0 and windows[-1].stop == len(chunks)
            for before, after in pairwise(windows):
                assert before.stop - overlap <= after.start <= before.stop < after.stop
            for window in windows:
                item = prompt + join_chunks([chunks[number] for number in window])
                assert layout.num_vectors(layout.tokenize([item], LIMIT, prompt)).tolist() == [len(window)]
    assert len(layout.chunk_windows(["alpha " * 50, "beta"], LIMIT)) == 2


def test_equal_chunks_of_different_documents_have_one_key():
    batch = tokenised(rows(7), TextTokenizer(small_tokenizer(), 48, chunked_layout()))
    inputs = batch.tokens and chunked_layout().inputs(batch.tokens, 48)
    keys = dict[str, set[int]]()
    number = inputs.num_queries
    for row in batch.rows:
        for position, item in enumerate(row.documents.texts):
            chunks, answers = chunks_of(item)
            chosen = list(range(len(chunks)))
            if answers and position == 0:
                chosen = [*answers[:1], *(i for i in chosen if i not in answers)]
            for chunk in chosen:
                keys.setdefault(chunks[chunk], set()).add(int(inputs.texts.keys[number]))
                number += 1
    assert number == len(inputs.texts.keys)
    assert all(len(of_chunk) == 1 for of_chunk in keys.values())
    assert len(set().union(*keys.values())) == len(keys) > 10


def write_chunked_rows(path: Path) -> Path:
    """Rows whose positive is a chunk, pairs of whole texts, and a hard negative in chunks."""
    lines = []
    for number in range(36):
        count = 1 + number % 4
        chunks = [text(number * 3 + i, 2 + (number + i) % 5) for i in range(count)]
        positive = {"chunks": chunks, "chunk": number % count} if count > 1 else chunks[0]
        row = {"query": chunks[number % count].split()[0], "pos": [positive]}
        lines.append(row | ({"neg": [{"chunks": [text(number, 3), text(number + 1, 4)]}]} if number % 3 == 0 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_is_exported_with_the_vectors_of_chunks(ranks, tmp_path):
    """`load_encoder` opens the export with late chunking; plain texts have the vectors of sentence-transformers."""
    small = small_model("bert")
    model = save_small(small, tmp_path / "base")
    data = write_chunked_rows(tmp_path / "rows.jsonl")
    output = tmp_path / "run"
    ranks(
        2, run, f"model.path={model}", "model.chunking.late=true", "model.document_prompt='mu '",
        f"data.train=[{data}]", f"output_dir={output}", "train.steps=12", "export.check=true",
    )  # fmt: skip
    of_steps = losses(output)
    assert of_steps[12] < of_steps[1]
    documents = [["alpha beta", "gamma", "delta eta"], ["mu"], [text(number, 9) for number in range(12)]]
    with load_encoder(str(output / "model"), quiet=True) as encoder:
        vectors = encoder.encode_chunks(documents)
        plain = encoder.encode(["alpha beta", "gamma"], prompt="")
    backbone = AutoModel.from_pretrained(output / "model").eval()
    one_window = [plain_vectors(backbone, Pooling.mean, "mu " + join_chunks(chunks)) for chunks in documents[:2]]
    assert [len(of_document) for of_document in vectors] == [3, 1, 12]
    for of_document, expected in zip(vectors, one_window, strict=False):
        np.testing.assert_allclose(of_document, torch.stack(expected).detach().numpy(), atol=1e-5)
    theirs = SentenceTransformer(str(output / "model"), device="cpu").encode(["alpha beta", "gamma"], prompt="")
    np.testing.assert_allclose(plain, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.pooling=cls"], "chunking.late=true: with pooling=cls"),
        (["loss=cosent"], "loss=cosent: compares whole documents"),
        (["model.chunking.late=false"], "model.chunking.late=true"),
        (["evaluation.vectors=[{documents: int8}]"], "evaluation.vectors: .*chunking.late"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(ranks, tmp_path, options, message):
    arguments = [
        f"model.path={save_small(small_model('bert'), tmp_path / 'base')}", "model.chunking.late=true",
        f"data.train=[{write_chunked_rows(tmp_path / 'rows.jsonl')}]", f"output_dir={tmp_path}/run", "train.steps=1",
    ]  # fmt: skip
    base = [option for option in BASE if not option.startswith("loss.")]
    with pytest.raises(AssertionError, match=message):
        ranks(1, run_without_base, *base, *arguments, *options)


@pytest.mark.parametrize(
    ("positive", "message"),
    [
        ({"chunks": ["alpha", "beta"]}, "a positive has 2 chunks"),
        ({"chunks": ["alpha", "beta"], "chunk": 2}, '"chunk" of .* from 0 to 1, not a number'),
        ({"chunks": ["alpha", "beta"], "chunk": [0, True]}, '"chunk" of .* from 0 to 1, not a truth value'),
        ({"chunks": []}, "is an empty list"),
        ({"chunks": ["alpha", " "]}, "is an empty text"),
    ],
)
def test_a_document_in_chunks_that_cannot_be_used_is_one_sentence(positive, message):
    with pytest.raises(BadRow, match=message):
        RowCheck(RowRequirements())(Example("mu", Documents((values.text(positive, "the document"),))))


def test_a_document_in_chunks_is_written_as_it_is_read(tmp_path):
    for value in ({"chunks": ["a", "b"]}, {"chunks": ["a", "b"], "chunk": 1}, {"chunks": ["a", "b"], "chunk": [0, 1]}):
        item = values.text(value, "the document")
        assert written_item(item, tmp_path) == value
        assert shown_item(item) == "a | b"
    titled = values.text({"title": "t", "chunks": ["a", "b"]}, "the document")
    assert chunks_of("prompt " + titled) == (["prompt t a", "b"], [])
