"""The model as mteb sees it: an encoder and a search engine in one process, with all ranks behind it.

Written for `EncoderProtocol` and `SearchProtocol` of mteb 2.26, which mteb distinguishes by their methods.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.commands.evaluate.mteb_commands import (
    AddDocuments,
    CommandChannel,
    EncodeTexts,
    NewIndex,
    ScoreDocuments,
    SearchDocuments,
)
from embedtrain.errors import ConfigError
from embedtrain.inference.index import trec_order

# Characters of the texts that are sent to all ranks at a time.
MAX_CHARACTERS = 1 << 24
# Queries per command, which bounds its size.
_QUERIES_PER_COMMAND = 8192


@dataclass(frozen=True)
class MtebSettings:
    """Settings of a model directory that mteb uses with sentence-transformers as well."""

    prompts: Mapping[str, str]  # by name: of tasks, of types of tasks, `query` and `document`
    default_prompt: str  # for texts without a prompt in `prompts`
    similarity: str  # one of `VectorSimilarity`
    has_text_vectors: bool = True  # one per text, which tasks other than retrieval and reranking need


class ShardedModel:
    """Encodes and searches for mteb on all ranks; exists on rank 0.

    The name and the revision of `meta`, mteb's ModelMeta, name the result files.
    """

    def __init__(
        self, channel: CommandChannel, settings: MtebSettings, meta: Any, *, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self.mteb_model_meta = meta
        self._channel, self._settings, self._max_characters = channel, settings, max_characters
        self._corpus: Any = None

    def encode(
        self, inputs: Iterable[Mapping[str, list[str]]], *, task_metadata: Any, prompt_type: Any = None, **_: Any
    ) -> NDArray[np.float32]:
        """Vectors of all texts, float32 [n, D], not normalized."""
        if not self._settings.has_text_vectors:
            raise ConfigError(
                f"{task_metadata.name} needs one vector per text, and a late-interaction model computes one per token; "
                "only tasks of retrieval and reranking are supported"
            )
        prompt = self._prompt(task_metadata, prompt_type)
        parts: list[Tensor] = [
            self._channel.run(EncodeTexts(texts, prompt)).cpu()
            for texts in _text_batches(_texts(inputs), self._max_characters)
        ]
        return np.concatenate([part.numpy() for part in parts or [self._channel.run(EncodeTexts([], prompt)).cpu()]])

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of all pairs, [n, m]."""
        from sentence_transformers.util.similarity import SimilarityFunction

        return SimilarityFunction.to_similarity_fn(self._settings.similarity)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each pair of rows, [n]."""
        from sentence_transformers.util.similarity import SimilarityFunction

        return SimilarityFunction.to_similarity_pairwise_fn(self._settings.similarity)(embeddings1, embeddings2)

    def index(self, corpus: Any, **_: Any) -> None:
        """Store the corpus; which of its documents are needed is only known in `search`."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Scores of the best documents by query id, best first; only among those of `top_ranked` if it is given."""
        from mteb._create_dataloaders import create_dataloader  # as mteb's own models do; checked on mteb 2.26
        from mteb.types import PromptType

        def read(dataset: Any, prompt_type: Any) -> tuple[Iterator[str], str]:
            loader = create_dataloader(dataset, task_metadata=task_metadata, prompt_type=prompt_type, batch_size=1024)
            return _texts(loader), self._prompt(task_metadata, prompt_type)

        query_ids = [str(query_id) for query_id in queries["id"]]
        query_texts, prompt = read(queries, PromptType.query)
        texts = list(query_texts)
        corpus, ids = self._needed_documents(top_ranked)
        results: dict[str, dict[str, float]] = {query_id: {} for query_id in query_ids}
        if not ids:
            return results
        self._index_documents(*read(corpus, PromptType.document), ids)
        for start in range(0, len(query_ids), _QUERIES_PER_COMMAND):
            batch = slice(start, start + _QUERIES_PER_COMMAND)
            if top_ranked is None:
                ranking = self._channel.run(SearchDocuments(texts[batch], prompt, top_k))
                lists = ranking.documents.tolist(), ranking.scores.tolist()
                rankings: Iterable[tuple[list[int], list[float]]] = zip(*lists, strict=True)
            else:
                candidates = [top_ranked.get(query_id) or [] for query_id in query_ids[batch]]
                rankings = self._rank_candidates(texts[batch], prompt, candidates, ids, top_k)
            for query_id, (documents, scores) in zip(query_ids[batch], rankings, strict=True):
                results[query_id] = {ids[number]: score for number, score in zip(documents, scores, strict=True)}
        return results

    def _needed_documents(self, top_ranked: Mapping[str, Sequence[str]] | None) -> tuple[Any, list[str]]:
        """The documents to index, and their ids."""
        ids = [str(document_id) for document_id in self._corpus["id"]]
        if top_ranked is None:
            return self._corpus, ids
        candidates = {document for documents in top_ranked.values() for document in documents}
        rows = [row for row, document_id in enumerate(ids) if document_id in candidates]
        return self._corpus.select(rows), [ids[row] for row in rows]

    def _index_documents(self, texts: Iterator[str], prompt: str, ids: Sequence[str]) -> None:
        self._channel.run(NewIndex(trec_order(ids).numpy()))
        first = 0
        for batch in _text_batches(texts, self._max_characters):
            self._channel.run(AddDocuments(batch, prompt, first))
            first += len(batch)

    def _rank_candidates(
        self, queries: list[str], prompt: str, candidates: list[Sequence[str]], ids: Sequence[str], top_k: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """The candidates of each query and their scores, best first, with ties in the order of trec_eval."""
        number_of = {document_id: row for row, document_id in enumerate(ids)}
        numbers = np.full((len(queries), max(map(len, candidates), default=0)), -1, dtype=np.int64)
        for row, documents in enumerate(candidates):
            numbers[row, : len(documents)] = [number_of[document] for document in documents]
        scores = self._channel.run(ScoreDocuments(queries, prompt, numbers)).tolist()
        for documents, row_scores, row_numbers in zip(candidates, scores, numbers.tolist(), strict=True):
            triples = zip(row_scores, documents, row_numbers, strict=False)
            best = sorted(triples, key=lambda triple: triple[:2], reverse=True)[:top_k]
            yield [number for _, _, number in best], [score for score, _, _ in best]

    def _prompt(self, task_metadata: Any, prompt_type: Any) -> str:
        """In mteb's order: the prompt of the task, of its type, of queries or documents, the model's default."""
        from mteb.models.abs_encoder import get_prompt_name

        name = get_prompt_name(dict(self._settings.prompts), task_metadata, prompt_type)
        return self._settings.default_prompt if name is None else self._settings.prompts[name]


def _texts(batches: Iterable[Mapping[str, list[str]]]) -> Iterator[str]:
    for batch in batches:
        yield from batch["text"]


def _text_batches(texts: Iterator[str], max_characters: int) -> Iterator[list[str]]:
    """Texts of at most `max_characters` characters in total, or a single longer one."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        if batch and num_characters + len(text) > max_characters:
            yield batch
            batch, num_characters = [], 0
        batch.append(text)
        num_characters += len(text)
    if batch:
        yield batch
