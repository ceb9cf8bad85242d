"""Items that cost more than tokens and are decoded in the background: a kind whose words may be pictures."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from embedtrain.config.losses import Similarity
from embedtrain.config.recipe import ModelConfig
from embedtrain.data.tokens import Layout
from embedtrain.formats.model_files import ModelFiles, write_own_tokenizer
from embedtrain.formats.source import read_files, source_of
from embedtrain.inference.vectors import vector_score
from embedtrain.kinds import BackboneKind
from embedtrain.models.encoder import Head, hidden_size
from embedtrain.models.pooling import PooledTokens
from embedtrain.utils.files import write_json
from tests.runs import metric_rows, run_without_base
from tests.small import save_small, small_model, write_beir, write_rows
from tests.test_run_losses import BASE

KIND, MAX_PATCHES, WIDTH = "tests.data.test_decoded_items:Drawn", 12, 6
PICTURES = [13, 14]  # "kappa" and "lambda"
decoded: list[tuple[str, int, int]] = []  # of each chunk: the thread, the texts and their patches


def num_patches(ids):
    """A picture of id i has 1 + i % 4 patches, which is known without decoding it."""
    return np.where(np.isin(ids, PICTURES), 1 + ids % 4, 0)


class DrawnLayout(Layout):
    """Texts of words and pictures."""

    further_limits = (MAX_PATCHES,)

    def further_costs(self, tokens):
        owners = np.repeat(np.arange(len(tokens)), tokens.lengths)
        return np.bincount(owners, num_patches(tokens.ids), len(tokens)).astype(np.int64)[:, None]

    def decode(self, tokens):
        counts = num_patches(tokens.ids)
        random = [torch.randn(int(n), WIDTH, generator=torch.Generator().manual_seed(int(i)))
                  for i, n in zip(tokens.ids, counts, strict=True) if n]  # fmt: skip
        owners = np.repeat(np.repeat(np.arange(len(tokens)), tokens.lengths), counts)
        decoded.append((threading.current_thread().name, len(tokens), len(owners)))
        return {"patches": torch.cat([torch.empty(0, WIDTH), *random]), "texts": torch.from_numpy(owners)}


class DrawnHead(Head):
    """The mean of a text's tokens and the sum of its patches, projected: [N, D]."""

    def __init__(self, size):
        self.dimension, self.projection = size, nn.Linear(WIDTH, size)
        self.modules = {"projection": self.projection}

    def __call__(self, hidden, chunk):
        tokens = PooledTokens.of(chunk)
        words = tokens.mean(hidden if chunk.packing is None else hidden[0], tokens.weights())
        decoded = chunk.decoded or {"patches": words.new_empty(0, WIDTH), "texts": chunk.ids.new_empty(0)}  # in checks
        patches = self.projection(decoded["patches"])  # also if there are none, because other ranks may have some
        return (normalize(words.index_add(0, decoded["texts"], patches), dim=1),)


@dataclass(kw_only=True)
class DrawnOptions(ModelConfig):
    kind: str = KIND


class DrawnFiles(ModelFiles):
    """The backbone and a mark."""

    plural = "models of words and pictures"
    description = "A model of {dimension} dimensions, for texts of up to {max_length} tokens"

    def write(self, directory, source, tokenizer):
        write_own_tokenizer(directory, tokenizer)
        write_json(directory / "drawn.json", {})


class Drawn(BackboneKind):
    """Words and pictures."""

    name, summary, options = KIND, "words and pictures", DrawnOptions

    def recognise(self, directory):
        return "a model of words and pictures" if (directory / "drawn.json").is_file() else None

    def read(self, directory, model):
        return source_of(self, read_files(directory, model))

    def new(self, source, model):
        return source

    def dimension(self, source):
        return hidden_size(source.config)

    def layout(self, source, tokenizer):
        return DrawnLayout(tokenizer)

    def head(self, source):
        torch.manual_seed(0)
        return DrawnHead(hidden_size(source.config))

    def locate_head(self, source, shapes, stored):
        return {}, {f"projection.{name}" for name in ("weight", "bias")}

    def head_weights(self, source):
        return {f"projection.{name}": weight.data for name, weight in self.head(source).projection.named_parameters()}

    def score(self, source):
        return vector_score(Similarity.dot)

    @property
    def files(self):
        return DrawnFiles()


def run(world, *arguments):
    decoded.clear()
    run_without_base(world, *(set(BASE) - {"model.pooling=mean"}), *arguments)
    return decoded


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_pictures_are_trained_exactly(ranks, tmp_path, sizes):
    """Any number of ranks has the same losses, gradients and figures; no chunk has more patches than are allowed."""
    write_rows(tmp_path / "train.jsonl", 26)
    write_beir(tmp_path / "dev", 6)
    save_small(small_model("xlm-roberta"), tmp_path / "model")
    options = [f"model.kind={KIND}", f"model.path={tmp_path / 'model'}", f"data.train=[{tmp_path / 'train.jsonl'}]"]
    evaluated, rows = f"evaluation.sets=[{tmp_path / 'dev'}]", {}
    for size in (1, *sizes):
        more = [] if size == 2 else [evaluated]
        of_ranks = ranks(size, run, *options, *more, f"output_dir={tmp_path / str(size)}")
        chunks = [chunk for of_rank in of_ranks for chunk in of_rank]
        rows[size] = metric_rows(tmp_path / str(size))
        assert all(num_texts == 1 or patches <= MAX_PATCHES for _, num_texts, patches in chunks)
        assert max(patches for _, _, patches in chunks) > MAX_PATCHES / 2
        if not more:  # a search of one chunk needs no thread; the main thread decodes dummies, which have no patches
            assert {thread for thread, _, patches in chunks if patches} == {"prefetch_0"}
    for name in ("loss", "grad_norm", "ndcg@10"):
        figures = {size: [row[name] for row in rows[size] if name in row] for size in rows}
        assert figures[1]
        for size in {size for size in sizes if name != "ndcg@10" or size == 3}:
            assert figures[size] == pytest.approx(figures[1], rel=1e-4)
