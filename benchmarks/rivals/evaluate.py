"""nDCG@10 of a trained model of any kind, by other code than that of the libraries that are compared.

`python -m benchmarks.rivals.evaluate KIND QLEN DLEN SET...` reads the directory of a model from each line of its
standard input and answers with a line of JSON, `{set: value}`. Each SET is a directory in the layout of BEIR. Models
compute in fp32 on all cores, or on the GPU if there is one.

- dense: cosine similarities of the vectors of sentence-transformers; of a directory of transformers alone, the mean of
  the last hidden states.
- reranker: the logit of transformers' AutoModelForSequenceClassification orders the best 10 documents of BM25, for
  100 queries.
- late_interaction: exact MaxSim of sentence-transformers' MultiVectorEncoder.
- sparse: dot products of sentence-transformers' SparseEncoder. The answer also has the mean number of active words of a
  document, over all sets.
"""

import argparse
import gzip
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import pytrec_eval
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from benchmarks.rivals.libraries import ACTIVE_WORDS

DEPTH = 100  # documents per query that are given to pytrec_eval
RERANKED, RERANKED_QUERIES = 10, 100  # documents per query, and queries of a set, that a reranker scores
BATCH = 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Scores [Q, N] of queries and documents; of sparse vectors also [N], the number of active words of each document.
Scores = Callable[[list[str], list[str]], tuple[torch.Tensor, torch.Tensor | None]]
LOADING: dict[str, Any] = {"local_files_only": True, "device": DEVICE, "model_kwargs": {"dtype": torch.float32}}


@dataclass(frozen=True)
class RetrievalSet:
    """Texts by id, and the judgements of pytrec_eval."""

    queries: dict[str, str]
    documents: dict[str, str]
    qrels: dict[str, dict[str, int]]


def read_set(directory: Path) -> RetrievalSet:
    """Read a directory of BEIR; queries without judgements are left out."""
    qrels: dict[str, dict[str, int]] = {}
    for line in (directory / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, score = line.split("\t")
        qrels.setdefault(query, {})[document] = int(score)
    queries = {row["_id"]: row["text"] for row in _rows(directory / "queries.jsonl") if row["_id"] in qrels}
    documents = {
        row["_id"]: (row.get("title", "") + " " + row["text"]).strip() for row in _rows(directory / "corpus.jsonl")
    }
    return RetrievalSet(queries, documents, qrels)


def first_queries(data: RetrievalSet, count: int) -> RetrievalSet:
    """The same documents, and some of the queries."""
    queries = dict(list(data.queries.items())[:count])
    return RetrievalSet(queries, data.documents, {query: data.qrels[query] for query in queries})


def _rows(path: Path) -> list[dict[str, str]]:
    compressed = path.with_name(path.name + ".gz")
    data = gzip.decompress(compressed.read_bytes()) if compressed.is_file() else path.read_bytes()
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line]


def dense_scores(model: Path, query_length: int, document_length: int) -> Scores:
    """Cosine similarities [Q, N] of texts."""
    if (model / "modules.json").is_file():
        encoder = SentenceTransformer(str(model), **LOADING)
    else:
        transformer = Transformer(str(model), model_kwargs={"dtype": torch.float32})
        pooling = Pooling(transformer.get_embedding_dimension(), "mean")
        encoder = SentenceTransformer(modules=[transformer, pooling, Normalize()], device=DEVICE)

    def encode(texts: list[str], length: int) -> torch.Tensor:
        encoder.max_seq_length = length
        return encoder.encode(texts, batch_size=BATCH, convert_to_tensor=True, normalize_embeddings=True)

    def scores(queries: list[str], documents: list[str]) -> tuple[torch.Tensor, None]:
        return encode(queries, query_length) @ encode(documents, document_length).T, None

    return scores


def sparse_scores(model: Path, query_length: int, document_length: int) -> Scores:
    """Dot products [Q, N] of weights of words."""
    encoder = SparseEncoder(str(model), **LOADING)

    def scores(queries: list[str], documents: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        encoder.max_seq_length = query_length
        of_queries = encoder.encode_query(queries, batch_size=BATCH)
        encoder.max_seq_length = document_length
        of_documents = encoder.encode_document(documents, batch_size=BATCH)
        words = of_documents.coalesce().indices()[0].bincount(minlength=len(documents))
        return torch.sparse.mm(of_queries, of_documents.T).to_dense(), words

    return scores


def late_interaction_scores(model: Path, query_length: int, document_length: int) -> Scores:
    """Sums [Q, N] of each query token's largest similarity."""
    encoder = MultiVectorEncoder(str(model), **LOADING)
    transformer = encoder[0]
    if transformer.query_expansion is None:
        transformer.query_length = query_length
    else:  # its length is that of queries
        transformer.query_expansion = transformer.query_expansion | {"length": query_length}
    transformer.document_length = document_length

    def scores(queries: list[str], documents: list[str]) -> tuple[torch.Tensor, None]:
        of_queries = encoder.encode_query(queries, batch_size=BATCH)
        of_documents = encoder.encode_document(documents, batch_size=BATCH)
        return encoder.similarity(of_queries, of_documents), None

    return scores


SCORES = {"dense": dense_scores, "sparse": sparse_scores, "late_interaction": late_interaction_scores}


def retrieve(matrix: torch.Tensor, data: RetrievalSet) -> dict[str, dict[str, float]]:
    """The best documents of each query by their scores [Q, N]."""
    matrix = matrix.float().cpu()
    ids = list(data.documents)
    best = matrix.topk(min(DEPTH, len(ids)))
    return {
        query: {ids[index]: value for index, value in zip(columns, values, strict=True)}
        for query, columns, values in zip(data.queries, best.indices.tolist(), best.values.tolist(), strict=True)
    }


def bm25(data: RetrievalSet) -> dict[str, list[str]]:
    """The best `RERANKED` documents of each query by BM25."""
    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(data.documents.values()), show_progress=False), show_progress=False)
    words = bm25s.tokenize(list(data.queries.values()), show_progress=False)
    found = index.retrieve(words, k=min(RERANKED, len(data.documents)), show_progress=False).documents.tolist()
    ids = list(data.documents)
    return {query: [ids[row] for row in rows] for query, rows in zip(data.queries, found, strict=True)}


@torch.inference_mode()
def rerank(model: Path, max_length: int, data: RetrievalSet) -> dict[str, dict[str, float]]:
    """The candidates of BM25 with the logit of their pair; pairs of similar length are in one batch.

    Tevatron, which writes reranker_config.json, trains and scores a pair as one text without token types.
    """
    classifier = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).to(DEVICE).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [(query, document) for query, documents in bm25(data).items() for document in documents]
    pairs.sort(key=lambda pair: len(data.queries[pair[0]]) + len(data.documents[pair[1]]))
    run: dict[str, dict[str, float]] = {}
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        texts = ([data.queries[query] for query, _ in batch], [data.documents[document] for _, document in batch])
        options = {"truncation": True, "max_length": max_length, "padding": True, "return_tensors": "pt"}
        if (model / "reranker_config.json").is_file():
            joined = [f"{query} {document}" for query, document in zip(*texts, strict=True)]
            inputs = tokenizer(joined, return_token_type_ids=False, **options)
        else:
            inputs = tokenizer(*texts, **options)
        logits = classifier(**inputs.to(DEVICE)).logits[:, 0].tolist()
        for (query, document), logit in zip(batch, logits, strict=True):
            run.setdefault(query, {})[document] = logit
    return run


def evaluate(scores: Scores, sets: dict[str, RetrievalSet]) -> dict[str, float]:
    """nDCG@10 on each set, and the mean number of active words of a document if its vectors are sparse."""
    results, words = {}, []
    for name, data in sets.items():
        matrix, of_documents = scores(list(data.queries.values()), list(data.documents.values()))
        results[name] = ndcg(data, retrieve(matrix, data))
        words += [] if of_documents is None else [of_documents]
    return results | ({ACTIVE_WORDS: torch.cat(words).float().mean().item()} if words else {})


def ndcg(data: RetrievalSet, run: dict[str, dict[str, float]]) -> float:
    """Mean nDCG@10 over all judged queries."""
    values = pytrec_eval.RelevanceEvaluator(data.qrels, {"ndcg_cut.10"}).evaluate(run)
    return sum(row["ndcg_cut_10"] for row in values.values()) / len(data.qrels)


def main() -> None:
    """Evaluate each model on every set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*SCORES, "reranker"])
    parser.add_argument("query_length", type=int)
    parser.add_argument("document_length", type=int)
    parser.add_argument("sets", type=Path, nargs="+")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sets = {directory.name: read_set(directory) for directory in options.sets}
    if options.kind == "reranker":
        sets = {name: first_queries(data, RERANKED_QUERIES) for name, data in sets.items()}
    lengths = options.query_length, options.document_length
    for line in sys.stdin:
        model = Path(line.strip())
        if options.kind == "reranker":
            results = {name: ndcg(data, rerank(model, sum(lengths), data)) for name, data in sets.items()}
        else:
            results = evaluate(SCORES[options.kind](model, *lengths), sets)
        print(json.dumps(results), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next training has the GPU


if __name__ == "__main__":
    main()
