"""Pairs of texts: the ids, types and truncation of the tokenizers themselves, and whole batches of pairs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embedtrain.data.cache.token_store import tokenise_queries
from embedtrain.data.rows import Documents, Example, TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import SECOND_SEGMENT, GlobalBatch, Pair, TextRole
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.errors import ModelError
from embedtrain.kinds.cross_encoder.model import PairFormat, PairLayout, PairTruncation
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import TextTokens

TEXTS = [
    "",
    "a",
    "Where is it?",
    "用于 YUV 缩放的库（工具）",
    "two  spaces\nand a line ",
    "word " * 7,
    "many words here " * 9,
]


def xlm_r() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS * 9, 400, 64)


def roberta() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("name", ["bert", "xlm_r", "roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_equal_those_of_the_tokenizer(name, side, request):
    bert = name == "bert"
    own = AutoTokenizer.from_pretrained(request.getfixturevalue("minilm_dir")) if bert else globals()[name]()
    own.truncation_side = side
    tokenizer = TextTokenizer(own, 64, PairLayout(own, PairFormat.of(own, token_types=bert)), packed=True)
    assert (tokenizer.layout.second_type, tokenizer.layout.num_pair_tokens) == ((1, 3) if bert else (0, 4))
    num_tokens = {text: len(own(text, add_special_tokens=False)["input_ids"]) for text in TEXTS}
    for length in (8, 9, 20, 64):
        # If both texts exceed the length, the tokenizer gives the odd token to the longer one, ours to the document.
        pairs = [Pair(*texts) for texts in itertools.product(TEXTS, TEXTS) if min(map(num_tokens.get, texts)) <= length]
        tokens = tokenizer.tokens(pairs, length)
        expected = own(
            *map(list, zip(*(pair[:2] for pair in pairs), strict=True)), truncation="longest_first", max_length=length
        )
        assert tokens.lists() == expected["input_ids"]
        if bert:
            for packed in (True, False):
                (chunk,) = tokenizer.with_packing(packed).cut(tokens, 1 << 20)
                types = [expected["token_type_ids"][row] for row in chunk.rows]
                real = chunk.types[chunk.mask.bool()]
                assert real.tolist() == [number for row in types for number in row]
    assert bert or tokenizer.chunk(tokens, [0]).types is None


def test_lengths_of_a_source_cut_texts_before_they_are_joined():
    own = xlm_r()
    tokenizer = TextTokenizer(own, 64, PairLayout(own, PairFormat.of(own)))
    query = tokenise_queries([(TEXTS[6], None)], TextFormat(query_max_length=5), tokenizer)
    document = tokenizer.layout.tokenize([TEXTS[5]], tokenizer.limit(TextRole.document, 3))
    texts = [own(text, add_special_tokens=False)["input_ids"] for text in (TEXTS[6], TEXTS[5])]
    assert tokenizer.layout.join(query, document, 64).lists() == [[0, *texts[0][:5], 2, 2, *texts[1][:3], 2]]


def test_only_the_document_is_cut():
    tokenizer = xlm_r()
    pair_format = replace(
        PairFormat.of(tokenizer), truncation=PairTruncation.only_second, max_query_fraction=0.75, after=(2, 7, 8)
    )
    pairs = TextTokenizer(tokenizer, 24, PairLayout(tokenizer, pair_format))
    query, document = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (TEXTS[5], TEXTS[6]))
    assert len(query) == 7 < len(document)
    (ids,) = pairs.ids([Pair(TEXTS[5], TEXTS[6])])
    assert ids == [0, *query, 2, 2, *document[: 24 - 13], 2, 7, 8]
    # A query that would fill the pair leaves a quarter of what is between the ends to the document.
    tokens = pairs.tokens([Pair(TEXTS[6], TEXTS[5])])
    assert tokens.ids[tokens.flags & SECOND_SEGMENT > 0].tolist() == [*query[:3], 2, 7, 8]
    assert len(tokens.ids) == 24
    # A query that is cut may leave the pair shorter than the maximum.
    (ids,) = pairs.ids([Pair(TEXTS[6], "a")])
    assert len(ids) < 24
    longer = [Pair(TEXTS[6], "a"), Pair(TEXTS[5], TEXTS[6]), Pair("a", TEXTS[5])]
    assert pairs.layout.are_whole(longer, 24).tolist() == [0, 0, 1]


def test_a_tokenizer_that_changes_texts_within_pairs_is_rejected():
    tokenizer = xlm_r()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$B $A", special_tokens=[]
    )
    with pytest.raises(ModelError, match="special tokens"):
        PairFormat.of(tokenizer)


def test_no_room_for_texts():
    with pytest.raises(ModelError, match="max_length=4"):
        TextTokenizer(xlm_r(), 4, PairLayout(xlm_r(), PairFormat.of(xlm_r())))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_pair_of_a_batch_is_encoded_once_and_sent_to_its_row(size):
    own = xlm_r()
    tokenizer = TextTokenizer(own, 24, PairLayout(own, PairFormat.of(own)), packed=True)
    rows = [Example(TEXTS[i], Documents(tuple(TEXTS[(i + j) % 7] for j in range(i % 4)))) for i in range(1, 7)]
    batch = GlobalBatch(0, rows)
    batch = replace(batch, tokens=TextTokens(batch, tokenizer))
    ranks = [make_rank_batch(batch, rank, size, tokenizer, ChunkOptions(40)) for rank in range(size)]
    encoded = [[tuple(text.tolist()) for chunk in rank.chunks for text in chunk.ids[0].split(chunk.packing.lengths)]
               for rank in ranks]  # fmt: skip
    sent = [
        np.split(np.array(rank.exchanges[0].send_order), np.cumsum(rank.exchanges[0].num_sent)[:-1]) for rank in ranks
    ]
    for rank, local in enumerate(ranks):
        arrived = [encoded[other][index] for other in range(size) for index in sent[other][rank].tolist()]
        pairs = local.exchanges[0].received_rows.argsort().tolist()
        expected = own(
            [row.query for row in rows[rank::size] for _ in row.documents.texts],
            [text for row in rows[rank::size] for text in row.documents.texts],
            truncation="longest_first",
            max_length=24,
        )["input_ids"]
        assert [list(arrived[index]) for index in pairs] == expected
        assert (local.num_queries, len(local.batch_info.query_keys)) == (0, len(rows[rank::size]))
        assert len(local.batch_info.owners) == len(expected)
