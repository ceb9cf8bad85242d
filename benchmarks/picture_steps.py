"""Training steps of pages and texts compared with those of sentence-transformers, which decode the files as well."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import AutoModel

from benchmarks.comparison import OPTIM, SCALE, make_step_context, prefetched
from benchmarks.inputs import disable_dropout
from benchmarks.measure import ROUNDS, interleave, markdown, ratio, require, speed, unit
from benchmarks.pictures import (
    draw_pictures,
    load_ours,
    load_theirs,
    picture_items,
    save_clip,
    save_idefics3,
    save_qwen,
)
from benchmarks.workloads import descriptions
from embedtrain.data.rows import Documents, Example, text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, TextRole, Tokens
from embedtrain.distributed.world import World, joined_world
from embedtrain.kinds.dense.vision import open_processor
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.step import train_step

ROWS = 16
TITLE = f"A training step of {ROWS} texts and {ROWS} pictures in fp32, against sentence-transformers"
TOLERANCE = 1e-4  # of losses
Rows = list[tuple[str, Path]]


def measure(**sizes: int) -> str:
    table = []
    with joined_world() as world, tempfile.TemporaryDirectory() as folder:
        paths = draw_pictures(Path(folder) / "pictures", ROWS * (ROUNDS + 1))
        shuffled = np.random.default_rng(0).permutation(len(paths))
        texts = [text for text, _ in descriptions()]
        pairs = [(texts[number], paths[place]) for number, place in enumerate(shuffled.tolist())]
        batches = [pairs[start : start + ROWS] for start in range(0, len(pairs), ROWS)]
        for name, (save, their_class) in _MODELS.items():
            directory = Path(folder) / name.split(",")[0]
            save(directory, **sizes)
            our_rounds, their_rounds = interleave(
                Ours(world, directory, batches), their_class(world, directory, batches)
            )
            difference = max(abs(a.value - b.value) for a, b in zip(our_rounds, their_rounds, strict=True))
            require(difference <= TOLERANCE, f"{name}: losses differ by {difference}")
            counts = [ROWS] * len(our_rounds)
            speeds = [f"{speed(rounds, counts):.2f}" for rounds in (our_rounds, their_rounds)]
            table.append([name, *speeds, ratio(our_rounds, their_rounds), f"{difference:.0e}"])
    header = ["model", *(f"{side}, rows / {unit()}" for side in ("ours", "theirs"))]
    return markdown([*header, "ratio", "loss difference"], table)


class Ours:
    """`train_step`, with what threads do before it: decoding and chunks. Texts are tokenized in advance."""

    def __init__(self, world: World, directory: Path, batches: Sequence[Rows]) -> None:
        self.model = load_ours(world, directory)
        self.run = make_step_context(self.model, world)
        self.batches = [global_batch(rows, self.model.tokenizer) for rows in batches]

    def __call__(self, round_number: int) -> float:
        """The loss of a step."""
        made = make_rank_batch(self.batches[round_number], 0, 1, self.model.tokenizer, ChunkOptions(1 << 30))
        return train_step(self.run, prefetched(made, self.run, self.model)).loss


class Theirs:
    """A step of their trainer without the trainer, with what its collator does before it."""

    def __init__(self, world: World, directory: Path, batches: Sequence[Rows]) -> None:
        self.model = load_theirs(world, directory)
        disable_dropout(self.model)
        self.model.train()
        self.loss = MultipleNegativesRankingLoss(self.model, scale=SCALE)
        self.optimizer, self.batches = build_optimizer(self.model, OPTIM), batches

    def __call__(self, round_number: int) -> float:
        """The loss of a step."""
        texts, paths = zip(*self.batches[round_number], strict=True)
        columns: list[Any] = [list(texts), [Image.open(path) for path in paths]]
        features = [self.model.preprocess(column) for column in columns]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(features, None)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or 0.0)
        self.optimizer.step()
        return float(loss)


class Padded:
    """The same of transformers' class and its processor, which sentence-transformers opens with torchvision alone."""

    def __init__(self, world: World, directory: Path, batches: Sequence[Rows]) -> None:
        self.processor = open_processor(directory, load_ours(world, directory).source)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModel.from_pretrained(directory).to(world.device).train()
        disable_dropout(self.model)
        self.optimizer, self.batches = build_optimizer(self.model, OPTIM), batches

    def __call__(self, round_number: int) -> float:
        """The loss of a step."""
        texts, paths = zip(*self.batches[round_number], strict=True)
        self.optimizer.zero_grad(set_to_none=True)
        queries = self._vectors([[{"type": "text", "text": text}] for text in texts], None)
        documents = self._vectors([[{"type": "image"}]] * len(paths), [[Image.open(path)] for path in paths])
        loss = F.cross_entropy(SCALE * queries @ documents.T, torch.arange(len(texts), device=queries.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or 0.0)
        self.optimizer.step()
        return float(loss)

    def _vectors(self, contents: list[Any], images: list[Any] | None) -> torch.Tensor:
        messages = [[{"role": "user", "content": content}] for content in contents]
        texts = self.processor.tokenizer.apply_chat_template(messages, tokenize=False)
        inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        hidden = self.model(**inputs.to(self.model.device)).last_hidden_state
        return F.normalize(hidden[:, -1], dim=-1)


_MODELS: dict[str, tuple[Any, Any]] = {
    "CLIP, ViT-B/32": (save_clip, Theirs),
    "Idefics3, 6 + 6 layers": (save_idefics3, Theirs),
    "Qwen3-VL, 6 + 8 layers": (save_qwen, Padded),
}


class _Tokens:
    """Tokens of queries and documents, as a cache has them (implements BatchTokens)."""

    def __init__(self, queries: list[str], documents: list[str], tokenizer: TextTokenizer) -> None:
        parts = (queries, TextRole.query), (documents, TextRole.document)
        layout = tokenizer.layout
        self._all = Tokens.concatenated(
            [layout.tokenize(items, tokenizer.limit(role), "", role) for items, role in parts]
        )
        self.num_documents = np.ones(len(queries), dtype=np.int64)
        self.lengths, self.keys = self._all.lengths, text_keys([*queries, *documents])

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        return self._all.take(texts)


def global_batch(rows: Rows, tokenizer: TextTokenizer) -> GlobalBatch:
    """A batch of texts, each with a picture."""
    queries, documents = [text for text, _ in rows], picture_items([path for _, path in rows])
    examples = tuple(Example(query, Documents((item,))) for query, item in zip(queries, documents, strict=True))
    return GlobalBatch(0, examples, tokens=_Tokens(queries, documents, tokenizer), has_loss_columns=False)
