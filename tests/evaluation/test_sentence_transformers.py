"""sentence-transformers' own evaluators on a model that is sharded over two ranks, before and after training."""

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer import evaluation as st
from torch.distributed.tensor import DTensor

from embedtrain.errors import ConfigError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sentence_transformers import SentenceTransformersAdapter
from embedtrain.evaluation.types import LoadedSet
from tests.evaluation.test_evaluator import pairs, small_set
from tests.evaluation.tiny import sentence_encoder
from tests.small import text

PROMPTS = {"query_prompt": "alpha ", "document_prompt": "nu "}


def run_evaluators(world, folder):
    encoder = sentence_encoder(world, **PROMPTS)
    model = SentenceTransformersAdapter(encoder)
    scored, data = pairs(), small_set()
    relevant = {query: {d for d, gain in judged.items() if gain} for query, judged in data.judgements.items()}
    similarity = st.EmbeddingSimilarityEvaluator(scored.first, scored.second, scored.scores, name="pairs")
    documents = dict(zip(data.documents.ids, data.documents.texts, strict=True))
    retrieval = st.InformationRetrievalEvaluator(data.queries, documents, relevant, name="small")
    triplets = st.TripletEvaluator(scored.first, scored.second, scored.second[::-1])
    path = str(folder) if world.is_main else None
    results = [similarity(model, path), retrieval(model, path), triplets(model)]
    results.append(st.SequentialEvaluator([similarity, retrieval])(model, path))

    # The model was never run before, and now it must train.
    assert all(isinstance(parameter, DTensor) for parameter in encoder.encoder.parameters())
    tokens = encoder.tokenizer.chunks([text(i, 4) for i in range(4)], 1000)[0]
    optimizer = torch.optim.SGD(encoder.encoder.parameters(), lr=0.5)
    encoder.encoder(tokens)[0][:, 0].sum().backward()
    optimizer.step()
    results.append(similarity(model))

    own = Evaluator([LoadedSet(scored, ""), LoadedSet(data)], encoder, world).evaluate()
    again = retrieval(model)
    return results, own, again


def test_evaluators_run_sharded_and_agree_with_ours(ranks, tmp_path):
    alone = ranks(1, run_evaluators, tmp_path)[0]
    both = ranks(2, run_evaluators, tmp_path)
    assert repr(both[0]) == repr(both[1])
    (similarity, retrieval, triplets, combined, trained), own, again = both[0]
    # Rank 0's and all ranks' metrics; before the first step the weights are the same for any number of ranks.
    assert similarity == pytest.approx(alone[0][0], abs=1e-6)
    assert retrieval == pytest.approx(alone[0][1], abs=1e-6)
    assert set(triplets) == {"cosine_accuracy"}
    assert combined["pairs_spearman_cosine"] == similarity["pairs_spearman_cosine"]
    assert trained["pairs_pearson_cosine"] != similarity["pairs_pearson_cosine"]
    # Theirs are means over queries with judgements too; nDCG differs in gains, recall and reciprocal rank do not.
    assert own["pairs"]["spearman"] == pytest.approx(trained["pairs_spearman_cosine"], abs=1e-6)
    assert own["small"]["recall@10"] == pytest.approx(again["small_cosine_recall@10"], abs=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "Information-Retrieval_evaluation_small_results.csv", "similarity_evaluation_pairs_results.csv",
    ]  # fmt: skip


def what_encode_gives(world):
    encoder = sentence_encoder(world, **PROMPTS)
    model = SentenceTransformersAdapter(encoder)
    texts = [text(i, 5) for i in range(6)]
    plain = model.encode(texts, batch_size=2, show_progress_bar=True)
    assert isinstance(plain, np.ndarray)
    assert plain.shape == (6, 32)
    one = model.encode(texts[2])
    assert one.shape == (32,)
    np.testing.assert_allclose(one, plain[2], atol=1e-6)
    assert model.encode(texts, convert_to_tensor=True).equal(torch.from_numpy(plain))
    listed = model.encode(np.array(texts), convert_to_numpy=False)
    assert torch.stack(listed).equal(torch.from_numpy(plain))
    assert model.encode(texts, truncate_dim=8, normalize_embeddings=True).shape == (6, 8)
    np.testing.assert_allclose(
        np.linalg.norm(model.encode(texts, truncate_dim=8, normalize_embeddings=True), axis=1), 1, 1e-5
    )
    assert model.encode(texts, precision="ubinary").dtype == np.uint8
    query, document = model.encode_query(texts), model.encode_document(texts)
    np.testing.assert_array_equal(query, model.encode(["alpha " + t for t in texts]))
    np.testing.assert_array_equal(document, model.encode(texts, "document"))
    np.testing.assert_array_equal(model.encode_query(texts, prompt="nu "), document)
    torch.testing.assert_close(model.similarity(query, document).diagonal(), model.similarity_pairwise(query, document))
    for wrong in ({"prompt_name": "passage"}, {"output_value": "token_embeddings"}):
        with pytest.raises(ConfigError):
            model.encode(texts, **wrong)
    return model.get_sentence_embedding_dimension(), model.max_seq_length, str(model.device)


def test_encode(ranks):
    assert ranks(2, what_encode_gives) == [(32, 16, "cpu")] * 2
