"""The model as mteb sees it: an encoder and a search engine in one process, with all ranks behind it.

Written against `EncoderProtocol` and `SearchProtocol` of mteb 2.26, which are told apart by their methods.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.evaluate.mteb.settings import MtebSettings
from embedtrain.evaluate.mteb.work import (
    AddDocuments,
    CommandChannel,
    EncodeTexts,
    NewIndex,
    ScoreDocuments,
    SearchDocuments,
)
from embedtrain.inference.index import trec_order

# Characters of the texts that all ranks hold at a time.
MAX_CHARACTERS = 1 << 24
# Queries at a time, so that an order stays small however many there are.
_QUERIES = 8192


class ShardedModel:
    """Encodes and searches for mteb on all ranks. Rank 0 has one.

    Args:
        work: what the ranks share.
        settings: prompts and similarity.
        meta: mteb's ModelMeta, under whose name results are kept.
        max_characters: characters of the texts that all ranks hold at a time.
    """

    def __init__(
        self, work: CommandChannel, settings: MtebSettings, meta: Any, *, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self.mteb_model_meta = meta
        self._work, self._settings, self._portion = work, settings, max_characters
        self._corpus: Any = None

    def encode(
        self, inputs: Iterable[Mapping[str, list[str]]], *, task_metadata: Any, prompt_type: Any = None, **_: Any
    ) -> NDArray[np.float32]:
        """Vectors of all texts, float32 [n, D], as the model gives them."""
        prompt = self._prompt(task_metadata, prompt_type)
        vectors: list[Tensor] = [
            self._work.do(EncodeTexts(texts, prompt)).cpu() for texts in _text_batches(_texts(inputs), self._portion)
        ]
        return np.concatenate([part.numpy() for part in vectors or [self._work.do(EncodeTexts([], prompt)).cpu()]])

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of all pairs, [n, m]."""
        from mteb.similarity_functions import cos_sim, dot_score

        return (dot_score if self._settings.similarity == "dot" else cos_sim)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each row of the one to the same row of the other, [n]."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_dot_score

        return (pairwise_dot_score if self._settings.similarity == "dot" else pairwise_cos_sim)(
            embeddings1, embeddings2
        )

    def index(self, corpus: Any, **_: Any) -> None:
        """Take note of the corpus; only `search` knows whether all of it is looked at."""
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
        """Scores of the best documents by query id, best first; of those in `top_ranked` where it is given."""
        from mteb._create_dataloaders import create_dataloader  # as mteb's own models do; checked on mteb 2.26
        from mteb.types import PromptType

        def read(dataset: Any, prompt_type: Any) -> tuple[Iterator[str], str]:
            loader = create_dataloader(dataset, task_metadata=task_metadata, prompt_type=prompt_type, batch_size=1024)
            return _texts(loader), self._prompt(task_metadata, prompt_type)

        names = [str(name) for name in queries["id"]]
        texts, prompt = read(queries, PromptType.query)
        asked = list(texts)
        corpus, ids = self._wanted(top_ranked)
        found: dict[str, dict[str, float]] = {name: {} for name in names}
        if not ids:
            return found
        self._fill(*read(corpus, PromptType.document), ids)
        for start in range(0, len(names), _QUERIES):
            some, of = asked[start : start + _QUERIES], names[start : start + _QUERIES]
            if top_ranked is None:
                ranking = self._work.do(SearchDocuments(some, prompt, top_k))
                best: Iterable[tuple[list[int], list[float]]] = zip(
                    ranking.documents.tolist(), ranking.scores.tolist(), strict=True
                )
            else:
                best = self._ranked(some, prompt, [top_ranked.get(name) or [] for name in of], ids, top_k)
            for name, (documents, scores) in zip(of, best, strict=True):
                found[name] = {ids[number]: score for number, score in zip(documents, scores, strict=True)}
        return found

    def _wanted(self, top_ranked: Mapping[str, Sequence[str]] | None) -> tuple[Any, list[str]]:
        """The documents that are looked at, and their ids."""
        ids = [str(name) for name in self._corpus["id"]]
        if top_ranked is None:
            return self._corpus, ids
        wanted = {document for documents in top_ranked.values() for document in documents}
        rows = [row for row, name in enumerate(ids) if name in wanted]
        return self._corpus.select(rows), [ids[row] for row in rows]

    def _fill(self, texts: Iterator[str], prompt: str, ids: Sequence[str]) -> None:
        self._work.do(NewIndex(trec_order(ids).numpy()))
        first = 0
        for max_characters in _text_batches(texts, self._portion):
            self._work.do(AddDocuments(max_characters, prompt, first))
            first += len(max_characters)

    def _ranked(
        self, queries: list[str], prompt: str, candidates: list[Sequence[str]], ids: Sequence[str], top_k: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Each query's candidates, best first; equal scores in the order of trec_eval."""
        number = {name: row for row, name in enumerate(ids)}
        table = np.full((len(queries), max(map(len, candidates), default=0)), -1, dtype=np.int64)
        for row, documents in enumerate(candidates):
            table[row, : len(documents)] = [number[document] for document in documents]
        scores = self._work.do(ScoreDocuments(queries, prompt, table)).tolist()
        for documents, row, of in zip(candidates, scores, table.tolist(), strict=True):
            pairs = sorted(zip(row, documents, of, strict=False), key=lambda pair: pair[:2], reverse=True)[:top_k]
            yield [document for _, _, document in pairs], [score for score, _, _ in pairs]

    def _prompt(self, task_metadata: Any, prompt_type: Any) -> str:
        """By mteb's order: the task's prompt, its type's, the query's or document's; else the model's default."""
        from mteb.models.abs_encoder import get_prompt_name

        name = get_prompt_name(dict(self._settings.prompts), task_metadata, prompt_type)
        return self._settings.default_prompt if name is None else self._settings.prompts[name]


def _texts(batches: Iterable[Mapping[str, list[str]]]) -> Iterator[str]:
    for batch in batches:
        yield from batch["text"]


def _text_batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Texts of at most `size` characters together, or a single longer one."""
    max_characters: list[str] = []
    held = 0
    for text in texts:
        if max_characters and held + len(text) > size:
            yield max_characters
            max_characters, held = [], 0
        max_characters.append(text)
        held += len(text)
    if max_characters:
        yield max_characters
