"""Prepare the tokens of a run: train a vocabulary if the recipe needs one, tokenise all texts, and count documents.

V: tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import Recipe
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.collectives import sum_over_ranks
from embedtrain.distributed.weights import copy_local_rows
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.models.static_queries import QUERY_WEIGHTS
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.tracking.console import Console
from embedtrain.utils.checksums import CHECKSUMS, damaged_files, write_checksums
from embedtrain.utils.files import remove_tree

_BLOCK_TEXTS = 1 << 16


def load_or_train_vocabulary(
    recipe: Recipe, data: TrainData, run_dir: RunDirectory, world: World, console: Console, *, from_scratch: bool
) -> PreTrainedTokenizerBase | None:
    """The vocabulary trained on the data, for a model from scratch without a tokenizer.

    A run that resumes reads its own unless it is damaged; any other trains one, because rows and options may differ.
    """
    if recipe.model.config is None or recipe.model.tokenizer is not None:
        return None
    directory = run_dir.tokenizer
    with world.fail_together("training a vocabulary"):
        damaged = damaged_files(directory) if world.is_main and (directory / CHECKSUMS).exists() else []
        if damaged and not from_scratch:
            console.warn(f"{directory / damaged[0]} is damaged: the vocabulary is trained again")
        if world.is_main and (from_scratch or damaged or not directory.is_dir()):
            with console.phase("training a vocabulary on the data"):
                trained = train_tokenizer(
                    data.texts(),
                    recipe.model.vocab_size,
                    recipe.model.max_length or 512,
                    lowercase=recipe.model.vocab_lowercase,
                )
                remove_tree(directory)
                trained.save_pretrained(directory)
                write_checksums(directory)
    with world.fail_together("reading the vocabulary"):
        tokenizer = read_tokenizer(directory, trust_remote_code=False)
    console.note(f"vocabulary: {len(tokenizer):,} pieces, trained on the data, in {directory}")
    return tokenizer


def tokenize_data(
    data: TrainData, model: LoadedModel, cache: Cache, world: World, console: Console, *, from_scratch: bool
) -> None:
    """Tokenise all texts that are not in the cache, and print notes.

    A run from scratch computes the weights of static queries, if the model has none, from the documents.
    """
    require_same_tokenizer(model.tokenizer, world)
    with world.fail_together("tokenising"), console.progress() as progress:
        notes = data.prepare(model.tokenizer, replace(cache, progress=progress))
    for note in notes:
        console.note(note)
    queries = None if model.source.words is None else model.source.words.queries
    if from_scratch and queries is not None and queries.path is None:
        assert data.tokens is not None
        with console.phase("computing the weights of queries from the documents"):
            weights = inverse_document_frequencies(data.tokens, model.source.dimension, world)
        copy_local_rows(model.encoder.state_dict()[QUERY_WEIGHTS], weights)


def require_same_tokenizer(tokenizer: TextTokenizer, world: World) -> None:
    """Reject tokenizers that differ between hosts: ranks would disagree about lengths and chunks."""
    reference, *others = world.gather(tokenizer.fingerprint)
    for rank, fingerprint in enumerate(others, start=1):
        if fingerprint != reference:
            raise DataError(
                f"rank {rank} has another tokenizer than rank 0: the model's files must be the same on all hosts"
            )


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
    pairs = np.unique(texts * num_tokens + store.ids(documents))
    return np.bincount(pairs % num_tokens, minlength=num_tokens)
