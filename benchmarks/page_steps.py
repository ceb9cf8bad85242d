"""Training steps of queries and pages compared with those of colpali-engine.

colpali-engine asks for torchvision, and is not installed with the other packages: `pip install colpali-engine`.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from benchmarks.comparison import OPTIM, make_step_context, prefetched
from benchmarks.inputs import disable_dropout
from benchmarks.measure import ROUNDS, interleave, markdown, ratio, require, speed, unit
from benchmarks.picture_steps import Rows, global_batch
from benchmarks.pictures import save_qwen
from benchmarks.workloads import descriptions
from embedtrain.config.kind_settings import TokenSimilarity
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.late_interaction.options import LateInteractionOptions
from embedtrain.losses.build import build_loss
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.step import train_step

ROWS = 16
TITLE = f"A training step of {ROWS} queries and {ROWS} pages in fp32, against colpali-engine"
TEMPERATURE = 0.02
TOLERANCE = 1e-5  # of losses before weights have moved apart
LATER_TOLERANCE = 2e-3  # after steps of AdamW, which divides gradients near zero by their size
SIDE = 32  # pixels of a token of a page
TOKENS = (90, 750)  # of a page


def measure(rows: int = ROWS, **sizes: int) -> str:
    with joined_world() as world, tempfile.TemporaryDirectory() as folder:
        directory = save_colqwen3(Path(folder) / "model", **sizes)
        paths = draw_pages(Path(folder) / "pages", rows * (ROUNDS + 1))
        texts = [text for text, _ in descriptions()]
        pairs = list(zip(texts, paths, strict=False))
        batches = [pairs[start : start + rows] for start in range(0, len(pairs), rows)]
        our_rounds, their_rounds = interleave(Ours(world, directory, batches), Theirs(world, directory, batches))
        first, *later = (abs(a.value - b.value) for a, b in zip(our_rounds, their_rounds, strict=True))
        difference = max(first, *later)
        is_equal = first <= TOLERANCE and difference <= LATER_TOLERANCE
        require(is_equal, f"losses differ by {difference}: {our_rounds} {their_rounds}")
        speeds = [f"{speed(of_side, [rows] * ROUNDS):.2f}" for of_side in (our_rounds, their_rounds)]
        row = ["ColQwen3, 6 + 8 layers", *speeds, ratio(our_rounds, their_rounds), f"{difference:.0e}"]
    header = ["model", *(f"{side}, rows / {unit()}" for side in ("ours", "theirs")), "ratio", "loss difference"]
    return markdown(header, [row])


class Ours:
    """`train_step`, with what threads do before it: decoding and chunks. Texts are tokenized in advance."""

    def __init__(self, world: World, directory: Path, batches: Sequence[Rows]) -> None:
        options = LateInteractionOptions(path=str(directory), similarity=TokenSimilarity.meanmaxsim)
        self.model = load_model(options, ParallelConfig(precision=Precision.fp32), world, seed=0)
        source = self.model.source
        score, config = source.kind.score(source), InfoNCEConfig(temperature=TEMPERATURE)
        loss = build_loss(config, dimension=source.dimension, seed=0, score=score)
        self.run = make_step_context(self.model, world, loss=loss)
        self.batches = [global_batch(rows, self.model.tokenizer) for rows in batches]

    def __call__(self, round_number: int) -> float:
        """The loss of a step."""
        made = make_rank_batch(self.batches[round_number], 0, 1, self.model.tokenizer, ChunkOptions(1 << 30))
        return train_step(self.run, prefetched(made, self.run, self.model)).loss


class Theirs:
    """A step of their trainer without the trainer, with what its collator does before it."""

    def __init__(self, world: World, directory: Path, batches: Sequence[Rows]) -> None:
        from colpali_engine.loss import ColbertLoss
        from colpali_engine.models import ColQwen3, ColQwen3Processor

        self.model: Any = ColQwen3.from_pretrained(directory).to(world.device).train()
        disable_dropout(self.model)
        self.processor: Any = ColQwen3Processor.from_pretrained(directory)
        self.loss: Any = ColbertLoss(temperature=TEMPERATURE).to(world.device)
        self.optimizer, self.batches = build_optimizer(self.model, OPTIM), batches

    def __call__(self, round_number: int) -> float:
        """The loss of a step."""
        texts, paths = zip(*self.batches[round_number], strict=True)
        suffix = self.processor.query_augmentation_token * 10
        queries = self.processor.process_texts([text + suffix for text in texts])
        pages = self.processor.process_images([Image.open(path) for path in paths])
        self.optimizer.zero_grad(set_to_none=True)
        vectors = [self.model(**inputs.to(self.model.device)) for inputs in (queries, pages)]
        loss = self.loss(*vectors)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or 0.0)
        self.optimizer.step()
        return float(loss)


def draw_pages(folder: Path, count: int) -> list[Path]:
    """Pages of text as PNG, of 90 to 750 tokens, which no processor resizes."""
    folder.mkdir(parents=True)
    texts, random, paths = [description for _, description in descriptions()], np.random.default_rng(0), []
    for number in range(count):
        tokens, shape = random.integers(*TOKENS), random.uniform(0.6, 1.5)
        across = max(6, round((tokens * shape) ** 0.5))
        width, height = across * SIDE, int(tokens) // across * SIDE
        page = Image.new("RGB", (width, height), "white")
        words = " ".join(texts[number * 20 : number * 20 + 20])
        lines = [words[start : start + width // 7] for start in range(0, len(words), width // 7)]
        ImageDraw.Draw(page).multiline_text((10, 10), "\n".join(lines[: height // 16]), fill="black")
        paths.append(folder / f"{number:03}.png")
        page.save(paths[-1])
    return paths


def save_colqwen3(directory: Path, **sizes: int) -> Path:
    """A directory of colpali-engine, made of that of `save_qwen`."""
    save_qwen(directory, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["ColQwen3"]}
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    projection = nn.Linear(config["text_config"]["hidden_size"], 320)
    weights = load_file(directory / "model.safetensors")
    weights |= {f"custom_text_proj.{name}": value.detach() for name, value in projection.named_parameters()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    image = json.loads((directory / "preprocessor_config.json").read_text())
    processor = {"image_processor": image, "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor"}}
    processor["processor_class"] = "ColQwen3Processor"
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory
