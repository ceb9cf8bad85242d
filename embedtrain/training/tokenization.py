"""Prepare the tokens of a run: train a vocabulary if the recipe needs one, and tokenise all texts."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checksums import CHECKSUMS, damaged_files, write_checksums
from embedtrain.config.recipe import Recipe
from embedtrain.data.cache.cache import Cache
from embedtrain.data.idf import inverse_document_frequencies
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.weights import copy_local_rows
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.files import remove_tree
from embedtrain.loading.load import LoadedModel
from embedtrain.models.static_queries import QUERY_WEIGHTS
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.tracking.console import Console


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
