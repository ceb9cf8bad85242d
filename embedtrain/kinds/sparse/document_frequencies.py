"""Inverse document frequencies of the training documents: the weights of static queries.

V: tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.cache.token_store import TokenStore
from embedtrain.distributed.collectives import sum_over_ranks
from embedtrain.distributed.world import World

_BLOCK_TEXTS = 1 << 16


def inverse_document_frequencies(stores: Sequence[TokenStore], num_tokens: int, world: World) -> Tensor:
    """ln(1 + (N - n + 0.5) / (n + 0.5)) of each token, float32 [V] on the CPU, as in BM25. A collective.

    N are the distinct documents of all stores, as they are truncated for training, and n those with the token. The
    ranks count disjoint parts of the documents, which depend on their texts alone.
    """
    counted = np.empty(0, dtype=np.int64)
    counts, number = np.zeros(num_tokens, dtype=np.int64), 0
    for store in stores:
        documents = _local_documents(store, world)
        keys, first = np.unique(store.keys[documents], return_index=True)
        is_new = ~np.isin(keys, counted, assume_unique=True)
        counted = np.concatenate([counted, keys[is_new]])
        documents = np.sort(documents[first[is_new]])
        number += len(documents)
        for start in range(0, len(documents), _BLOCK_TEXTS):
            counts += _document_frequencies(store, documents[start : start + _BLOCK_TEXTS], num_tokens)
    local = torch.from_numpy(np.append(counts, number)).double()
    total = sum_over_ranks(local.to(world.device)).cpu()
    frequencies, documents_of_all = total[:-1], total[-1]
    return torch.log1p((documents_of_all - frequencies + 0.5) / (frequencies + 0.5)).float()


def _local_documents(store: TokenStore, world: World) -> NDArray[np.int64]:
    """The documents of a store that this rank counts, by their keys: equal texts are on one rank."""
    return np.concatenate([np.empty(0, dtype=np.int64), *_blocks_of_documents(store, world)])


def _blocks_of_documents(store: TokenStore, world: World) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(store.keys), _BLOCK_TEXTS):
        keys = store.keys[start : start + _BLOCK_TEXTS]
        is_local = keys % world.size == world.rank
        bounds = np.searchsorted(store.row_starts, [start, start + len(keys)])
        # The first text of a row is the query.
        is_local[store.row_starts[bounds[0] : bounds[1]] - start] = False
        yield start + np.flatnonzero(is_local)


def _document_frequencies(store: TokenStore, documents: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """In how many of these documents each token is, int64 [V]."""
    lengths = store.lengths(documents)
    texts = np.repeat(np.arange(len(documents)), lengths)
    pairs = np.unique(texts * num_tokens + store.tokens(documents).ids)
    return np.bincount(pairs % num_tokens, minlength=num_tokens)
