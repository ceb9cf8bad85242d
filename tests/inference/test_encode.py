"""Encoding over ranks: the same bits on any number of them, and a model that can go on training."""

import random
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from embedtrain.config.evaluation import Unshard
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import EmbedtrainError, TrainingError
from embedtrain.inference import encode, encoding_plan
from embedtrain.inference.vector_cache import VectorCache
from tests.evaluation.tiny import TinyEncoder, sentence_encoder, sharded_encoder
from tests.memory import anonymous_mb, freed_memory
from tests.small import small_tokenizer, text

TEXTS = [text(i, 1 + i % 9) for i in range(20)]
TEXTS = [*TEXTS, TEXTS[3], "", TEXTS[3], TEXTS[7]]


def alone(texts, prompt=""):
    """Each text on its own through the whole model in one process."""
    encoder, tokenizer = TinyEncoder().eval(), TextTokenizer(small_tokenizer(), 16)
    with torch.no_grad():
        chunks = [tokenizer.chunk(tokenizer.tokens([prompt + t]), [0]) for t in texts]
        return torch.cat([encoder(chunk)[0] for chunk in chunks])


def encode_all(world, texts, prompt="", chunk_tokens=40):
    return sentence_encoder(world, chunk_tokens=chunk_tokens).encode_all(texts, prompt).tolist()


def join_blocks(blocks):
    blocks = list(blocks)
    return torch.cat([block.rows for block in blocks]), torch.cat([block.part.values for block in blocks])


def encode_sharded(world, texts):
    rows, vectors = join_blocks(sentence_encoder(world).encode_blocks(texts))
    return rows.tolist(), vectors.tolist()


def test_the_same_bits_on_any_number_of_ranks(ranks):
    results = [result for size in (1, 2, 3) for result in ranks(size, encode_all, TEXTS, "alpha ")]
    assert all(result == results[0] for result in results)
    torch.testing.assert_close(torch.tensor(results[0]), alone(TEXTS, "alpha "), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_every_text_lies_on_one_rank(ranks, size):
    shards = ranks(size, encode_sharded, TEXTS)
    rows = [row for rows, _ in shards for row in rows]
    assert sorted(rows) == list(range(len(TEXTS)))
    vectors = torch.tensor([vector for _, vectors in shards for vector in vectors])
    torch.testing.assert_close(vectors, alone(TEXTS)[rows], atol=1e-6, rtol=0)
    assert min(len(rows) for rows, _ in shards) > 0
    assert vectors[rows.index(3)].equal(vectors[rows.index(20)])  # TEXTS[3] again


# With 3 ranks: one chunk, four chunks (2, 1, 1), and a chunk for each of five texts (2, 2, 1).
@pytest.mark.parametrize(("num_texts", "chunk_tokens"), [(1, 40), (12, 16), (5, 1)])
def test_ranks_with_fewer_chunks_run_dummies(ranks, num_texts, chunk_tokens):
    texts = TEXTS[:num_texts]
    for result in ranks(3, encode_all, texts, "", chunk_tokens):
        torch.testing.assert_close(torch.tensor(result), alone(texts), atol=1e-6, rtol=0)


def shape_of_nothing(world):
    encoder = sentence_encoder(world)
    return tuple(encoder.encode_all([]).shape), tuple(join_blocks(encoder.encode_blocks([]))[1].shape)


def test_no_texts(ranks):
    assert ranks(2, shape_of_nothing) == [((0, 32), (0, 32))] * 2


def evaluate_then_train(world, inference_mode):
    encoder = sentence_encoder(world)
    model = encoder.encoder
    model.train()
    model.backbone.embeddings.eval()  # as one that freezes a part would have it
    with torch.inference_mode(inference_mode):
        shard = next(encoder.encode_blocks(TEXTS))
        everything = encoder.encode_all(TEXTS)
    assert not everything.is_inference()
    assert not shard.part.values.is_inference()
    assert not everything.requires_grad
    assert model.training
    assert not model.backbone.embeddings.training
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = encoder.tokenizer.chunks(TEXTS[:4], 1000)[0]
    before = encoder.encode_all(TEXTS[:1])
    for _ in range(2):
        model(tokens)[0][:, 0].sum().backward()
        optimizer.step()
    return (encoder.encode_all(TEXTS[:1]) - before).abs().max().item()


@pytest.mark.parametrize("inference_mode", [False, True])
def test_model_can_be_trained_after_evaluation(ranks, inference_mode):
    moved = ranks(2, evaluate_then_train, inference_mode)
    assert moved[0] == moved[1] > 1e-4


class Breaks(Exception):
    pass


def break_after(model, forwards):
    """Raise before the forward pass that follows `forwards` of them."""

    def before_pass(*_):
        if model.forwards == forwards:
            raise Breaks

    model.register_forward_pre_hook(before_pass, prepend=True)


def fail_between_two_passes(world):
    encoder = sentence_encoder(world)
    model = encoder.encoder.train()
    break_after(model, 1)
    with pytest.raises(Breaks):
        encoder.encode_all(TEXTS)
    return model.training and all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_model_is_restored_after_an_error(ranks):
    assert ranks(2, fail_between_two_passes) == [True, True]


def encode_with_nan(world):
    encoder = sentence_encoder(world, chunk_tokens=16)
    tokenizer = small_tokenizer()
    with torch.no_grad():
        weight = encoder.encoder.backbone.embeddings.word_embeddings.weight
        rank_batch = torch.zeros(64, 1)
        rank_batch[tokenizer.convert_tokens_to_ids("nu")] = torch.nan
        rows = weight.to_local().shape[0]
        weight.to_local().add_(rank_batch[world.rank * rows : (world.rank + 1) * rows])
    try:
        encoder.encode_all(["alpha", "beta", "gamma nu", "delta"])
    except EmbedtrainError as error:
        return type(error), str(error)
    return None


def test_vectors_that_are_not_finite_fail_on_all_ranks(ranks):
    answers = ranks(2, encode_with_nan)
    assert answers[0] == answers[1]
    kind, message = answers[0]
    assert kind is TrainingError
    assert message.startswith("1 vectors on rank 0 are not finite, the first of the text 'gamma nu'")


def gathered_at_a_time(world, gather):
    """The most blocks of four that are whole while one of them computes, how often, the vectors, and all after it."""
    encoder = sentence_encoder(world, chunk_tokens=1, unshard=gather)
    layers = encoder.encoder.backbone.encoder.layer
    whole = []

    def look(*_):
        whole.append(sum(not isinstance(next(layer.parameters()), DTensor) for layer in layers))

    for layer in layers:
        next(layer.children()).register_forward_pre_hook(look)
    vectors = encoder.encode_all(TEXTS[:7])
    sharded = all(isinstance(parameter, DTensor) for parameter in encoder.encoder.parameters())
    counts = len(whole), max(whole)
    encoder.unshard = Unshard.layer
    whole.clear()
    encoder.encode_all(TEXTS[:7])
    return counts, vectors.tolist(), sharded, max(whole)


def test_one_layer_is_gathered_at_a_time_unless_the_whole_model_is_requested(ranks):
    results = {gather: ranks(3, gathered_at_a_time, gather) for gather in Unshard}
    vectors = [result[1] for of in results.values() for result in of]
    assert all(result == vectors[0] for result in vectors)
    assert [(most, sharded, after) for (_, most), _, sharded, after in results[Unshard.layer]] == [(1, True, 1)] * 3
    assert [(most, sharded, after) for (_, most), _, sharded, after in results[Unshard.model]] == [(2, True, 1)] * 3
    # Seven chunks, two layers: block by block three passes on every rank; whole its own, and one that gathers.
    assert [result[0][0] for result in results[Unshard.layer]] == [6, 6, 6]
    assert [result[0][0] for result in results[Unshard.model]] == [8, 6, 6]


def several_blocks(world):
    """Whether weights are sharded between two of five blocks, how many follow, and whether all is as before after."""
    encoder = sentence_encoder(world, chunk_tokens=1, unshard=Unshard.model)
    layer = encoder.encoder.backbone.encoder.layer[0]
    before, encode.CHUNKS_PER_BLOCK = encode.CHUNKS_PER_BLOCK, 1
    try:
        blocks = encoder.encode_blocks(TEXTS[:10])
        next(blocks)
        between = isinstance(next(layer.parameters()), DTensor)
        rest = len(list(blocks))
    finally:
        encode.CHUNKS_PER_BLOCK = before
    after = all(isinstance(parameter, DTensor) for parameter in encoder.encoder.parameters())
    return between, rest, after, torch.is_grad_enabled()


def test_weights_stay_whole_from_block_to_block(ranks):
    assert ranks(2, several_blocks) == [(False, 4, True, True)] * 2


def encode_with_cache(world, folder, texts, stop_after=None):
    """Encode with vectors stored in `folder`, two chunks per block; perhaps fail between forward passes."""
    encoder = sentence_encoder(world, chunk_tokens=16)
    model = encoder.encoder
    break_after(model, stop_after)
    vector_cache = VectorCache(Path(folder), {"model": "tiny"})
    vectors = {}
    before, encode.CHUNKS_PER_BLOCK = encode.CHUNKS_PER_BLOCK, 2
    try:
        for block in encoder.encode_blocks(
            texts,
            "alpha ",
            vector_cache=vector_cache,
            transform=lambda part: part.to(part.values.device, torch.bfloat16),
        ):
            vectors |= dict(zip(block.rows.tolist(), block.part.values.float().tolist(), strict=True))
    except Breaks:
        return None
    finally:
        encode.CHUNKS_PER_BLOCK = before
    return vectors, model.forwards


def test_interrupted_encoding_resumes(ranks, tmp_path):
    texts = [text(i, 1 + i % 13) for i in range(150)] + [text(3, 4)] * 3
    expected, num_passes = ranks(1, encode_with_cache, tmp_path / "whole", texts)[0]
    assert ranks(2, encode_with_cache, tmp_path / "resumed", texts, 9) == [None, None]
    num_files = len(list((tmp_path / "resumed").rglob("*.safetensors")))
    assert num_files == 2 * 3, "four blocks of two passes on each of two ranks; the last was not read yet"
    results = ranks(3, encode_with_cache, tmp_path / "resumed", texts)
    rows = [row for vectors, _ in results for row in vectors]
    assert sorted(rows) == list(range(len(texts))), "each text on one rank"
    assert {row: vector for vectors, _ in results for row, vector in vectors.items()} == expected
    assert sum(passes for _, passes in results) < num_passes - 8
    assert ranks(2, encode_with_cache, tmp_path / "resumed", texts)[0][1] == 0
    # Other texts do not share vectors.
    assert ranks(1, encode_with_cache, tmp_path / "resumed", texts[1:])[0][1] > 20


def memory_returned(world, folder):
    """MB of freed memory that a process had before it encoded and stored texts, and has no longer."""
    with freed_memory():
        before = anonymous_mb()
        encode_with_cache(world, folder, TEXTS)
        return before - anonymous_mb()


def test_memory_that_a_stored_block_has_freed_is_returned(ranks, tmp_path):
    assert ranks(1, memory_returned, tmp_path)[0] > 100


def flip_stored_bits(world, folder, count):
    """Flip stored bits, one at a time; returns the flips after which vectors changed or were not encoded again."""
    draw = random.Random(world.size)

    def encode_texts():
        vectors, num_passes = encode_with_cache(world, folder, TEXTS)
        return {row: vector for rows in world.gather(list(vectors.items())) for row, vector in rows}, num_passes

    expected, _ = encode_texts()
    unequal = []
    for number in range(count):
        paths = sorted(Path(folder).rglob("*.safetensors"))
        if world.is_main:
            damaged = bytearray(paths[number % len(paths)].read_bytes())
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            paths[number % len(paths)].write_bytes(damaged)
        world.barrier()
        vectors, num_passes = encode_texts()
        if vectors != expected or not num_passes:
            unequal.append(number)
    return unequal


def test_damaged_stored_vectors_are_encoded_again(ranks, tmp_path):
    assert ranks(2, flip_stored_bits, tmp_path, 3) == [[], []]


@pytest.mark.slow
def test_many_flipped_bits_of_stored_vectors(ranks, tmp_path):
    assert ranks(1, flip_stored_bits, tmp_path, 300) == [[]]


def count_forwards(world):
    encoder = sharded_encoder(world)
    sentences = sentence_encoder(world, chunk_tokens=1)
    sentences.encoder = encoder
    sentences.encode_all(TEXTS[:5])
    return encoder.forwards


def test_every_rank_runs_the_same_number_of_passes(ranks):
    assert ranks(3, count_forwards) == [2, 2, 2]


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def encode_counting_texts(world, max_kept_tokens):
    """All vectors, and the texts that this rank tokenizes, with repetitions; "a" is the text of dummy passes."""
    encoder = sentence_encoder(world, chunk_tokens=16)
    tokens, tokenized = encoder.tokenizer.tokens, []

    def counting(texts, *options, **named):
        tokenized.extend(text for text in texts if text != "a")
        return tokens(texts, *options, **named)

    encoder.tokenizer.tokens = counting
    before, encoding_plan.MAX_KEPT_TOKENS = encoding_plan.MAX_KEPT_TOKENS, max_kept_tokens
    try:
        vectors = encoder.encode_all(TEXTS, "alpha ", existing_prompt="mu ")
    finally:
        encoding_plan.MAX_KEPT_TOKENS = before
    return vectors.tolist(), tokenized


@pytest.mark.parametrize("size", [1, 3])
def test_each_distinct_text_is_tokenized_once_if_tokens_fit_in_memory(ranks, size):
    distinct = sorted({"alpha " + text for text in TEXTS})
    kept, again = ranks(size, encode_counting_texts, 10**6), ranks(size, encode_counting_texts, 30)
    assert sorted(text for _, texts in kept for text in texts) == distinct
    assert sorted(text for _, texts in again for text in texts) == sorted(distinct * 2)
    assert all(vectors == kept[0][0] for vectors, _ in kept + again)


def fail_while_preparing(world):
    """Preparing the third chunk of rank 1 fails: the error, and the threads that are left."""
    encoder = sentence_encoder(world, chunk_tokens=1)
    make_chunk, prepared = encoder.tokenizer.make_chunk, []

    def fail_at_the_third(tokens, rows):
        if prefetch_threads() and threading.current_thread() in prefetch_threads():
            prepared.append(len(rows))
            if world.rank == 1 and len(prepared) == 3:
                raise ValueError("the third chunk")
        return make_chunk(tokens, rows)

    encoder.tokenizer.make_chunk = fail_at_the_third
    with pytest.raises((ValueError, EmbedtrainError)) as caught:
        encoder.encode_all(TEXTS)
    return str(caught.value), len(prefetch_threads())


def test_an_error_of_the_preparing_thread_fails_on_all_ranks(ranks):
    answers = ranks(3, fail_while_preparing)
    assert [left for _, left in answers] == [0, 0, 0]
    assert answers[1][0] == "the third chunk"
    for message, _ in (answers[0], answers[2]):
        assert message == "rank 1 failed while preparing texts: ValueError: the third chunk"


def abandon(world):
    """Chunks prepared when the first block arrives, the threads then, and those after the caller has stopped."""
    encoder = sentence_encoder(world, chunk_tokens=1)
    make_chunk, prepared = encoder.tokenizer.make_chunk, []

    def counting(tokens, rows):
        prepared.append(len(rows))
        return make_chunk(tokens, rows)

    encoder.tokenizer.make_chunk = counting
    before, encode.CHUNKS_PER_BLOCK = encode.CHUNKS_PER_BLOCK, 2
    try:
        blocks = encoder.encode_blocks([text(i, 1 + i % 13) for i in range(60)])
        next(blocks)
        during = len(prefetch_threads())
        blocks.close()
    finally:
        encode.CHUNKS_PER_BLOCK = before
    return len(prepared), during, len(prefetch_threads())


def test_few_chunks_are_prepared_ahead_and_the_thread_ends_with_the_encoding(ranks):
    for prepared, during, after in ranks(2, abandon):
        assert prepared <= 2 * 2 + 3, "two blocks are launched, one and the chunk in progress are ahead"
        assert (during, after) == (1, 0)
