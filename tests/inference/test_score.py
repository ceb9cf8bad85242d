"""Scores of pairs on any number of ranks: those of sentence-transformers, window by window, the same bits."""

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import SECOND_SEGMENT, Pair
from embedtrain.errors import TrainingError
from embedtrain.inference.pair_scorer import PairScorer, Selected, best_first
from embedtrain.kinds.cross_encoder.model import PairFormat, PairLayout, PairTruncation
from tests.evaluation.tiny import pair_encoder, pair_scorer, pair_tokenizer, save_tiny_cross_encoder
from tests.small import text

QUERIES = [text(i % 7, 1 + i % 5) for i in range(40)]
DOCUMENTS = [text(50 + i % 9, 1 + 4 * i % 37) for i in range(40)]


def scores(world, options, queries=QUERIES, documents=DOCUMENTS):
    return pair_scorer(world, **options).score(queries, documents).tolist()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    directory = save_tiny_cross_encoder(tmp_path_factory.mktemp("cross") / "model")
    return CrossEncoder(str(directory), device="cpu", max_length=24, activation_fn=torch.nn.Identity())


def test_scores_equal_those_of_sentence_transformers_on_any_number_of_ranks(ranks, theirs):
    results = [result for size in (1, 2, 3) for result in ranks(size, scores, {})]
    assert all(result == results[0] for result in results)
    expected = theirs.predict(list(zip(QUERIES, DOCUMENTS, strict=True)), show_progress_bar=False)
    assert results[0] == pytest.approx(expected.tolist(), abs=1e-6)
    prompts = {"query_prompt": "alpha ", "document_prompt": "beta gamma "}
    prompted = [("alpha " + query, "beta gamma " + text) for query, text in zip(QUERIES, DOCUMENTS, strict=True)]
    (result,) = ranks(1, scores, prompts)
    assert result == pytest.approx(theirs.predict(prompted, show_progress_bar=False).tolist(), abs=1e-6)


def test_long_documents_are_scored_in_windows(ranks, theirs):
    """As in BCEmbedding: overlaps of a quarter of the room, and the maximum."""
    results = [result for size in (1, 3) for result in ranks(size, scores, {"windows": True})]
    assert all(result == results[0] for result in results)
    expected, num_windows = [], []
    for query, document in zip(QUERIES, DOCUMENTS, strict=True):
        words, num_tokens = document.split(), 24 - 3 - len(query.split())
        starts = [0]
        while starts[-1] + num_tokens < len(words):
            starts.append(starts[-1] + num_tokens - min(80, num_tokens // 4))
        windows = [(query, " ".join(words[start : start + num_tokens])) for start in starts]
        expected.append(float(theirs.predict(windows, show_progress_bar=False).max()))
        num_windows.append(len(windows))
    assert max(num_windows) == 3
    assert min(num_windows) == 1
    assert results[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("truncation", list(PairTruncation), ids=lambda value: value.value)
def test_windows_cover_the_document_whatever_the_length_of_the_query(truncation):
    own = pair_tokenizer()
    own.truncation_side = "left"
    whole = PairFormat.of(own, token_types=True)
    cut = PairFormat(whole.before, whole.between, whole.after, whole.second_type, truncation, 1.0, from_left=True)
    tokenizer = TextTokenizer(own, 16, PairLayout(own, cut))
    for query_length in (0, 1, 6, 7, 12, 13, 40):
        query, document = text(3, query_length), " ".join("abcdefghijklmnopqrstuvwxyz"[:25])
        ((count, stride),) = tokenizer.layout.windows([Pair(query, document)], 16).tolist()
        windows = tokenizer.tokens([Pair(query, document, number * stride) for number in range(count)])
        assert (windows.lengths <= 16).all()
        each = [windows.take([number]) for number in range(count)]
        content = [window.ids[window.flags & SECOND_SEGMENT > 0].tolist()[:-1] for window in each]
        if content[0]:
            assert list(dict.fromkeys(np.concatenate(content).tolist())) == [
                token for (token,) in own([*"abcdefghijklmnopqrstuvwxy"], add_special_tokens=False)["input_ids"]
            ]
        else:
            assert (count, truncation) == (1, PairTruncation.only_second)


def count_scored(world):
    scorer = pair_scorer(world)
    forwards = []
    with scorer.report_progress(lambda label, done, total: forwards.append((label, done, total))):
        repeated = scorer.score(["alpha"] * 50, ["beta", "gamma"] * 25)
        empty = scorer.score([], [])
    assert repeated[::2].unique().numel() == 1
    return forwards, repeated.dtype, empty.shape


def test_equal_pairs_are_scored_once(ranks):
    (progress, dtype, empty), _ = ranks(2, count_scored)
    assert progress[0] == ("scoring pairs", 1, 1), "two distinct pairs fit into one chunk"
    assert (dtype, empty) == (torch.float32, (0,))


def not_finite(world):
    encoder = pair_encoder(world)
    encoder.encoder.model.classifier.bias.data.fill_(torch.nan)
    scorer = PairScorer(encoder)
    with pytest.raises(TrainingError, match=r"not finite.*'alpha'"):
        scorer.score(["alpha"], ["beta"])


def test_scores_that_are_not_finite_are_an_error(ranks):
    ranks(2, not_finite)


def test_ties_are_in_the_order_of_trec_eval():
    assert best_first([0.5, 1.0, 0.5, 1.0], ["a", "b", "c", "d"]) == [3, 1, 2, 0]
    selected = Selected(["a", "b", "c"], np.array([2, 0, 2]))
    assert (list(selected), selected[1:]) == (["c", "a", "c"], ["a", "c"])
