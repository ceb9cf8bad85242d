"""Guides and teachers of a loss: frozen models that encode the same texts, sharded like the trained model."""

from collections.abc import Sequence

import torch

from embedtrain.config.recipe import ModelConfig, ParallelConfig
from embedtrain.data.tokens import restore_order
from embedtrain.data.types import Tokens
from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.loading.load import load_model
from embedtrain.losses.types import Guide
from embedtrain.models.encoder import Encoder
from embedtrain.models.hub import split_revision
from embedtrain.training.rank_batch import GuideTokenizer


class GuideModel:
    """A frozen model that encodes the texts of a batch."""

    def __init__(self, encoder: Encoder, texts: GuideTokenizer, world: World) -> None:
        self.encoder = encoder.eval().requires_grad_(False)
        self.texts, self.world = texts, world
        self._dummy = texts.tokenizer.dummy().to(world.device)

    @property
    def dimension(self) -> int:
        """The dimension of its vectors."""
        return self.encoder.dimension

    def __call__(self, chunks: Sequence[Tokens], num_queries: int) -> Guide:
        """The vectors of this rank's chunks. A collective: every rank calls it, with or without rows."""
        # Over the host's process group: reading a tensor of the GPU would wait for all work that is queued there.
        (num_passes,) = max_over_ranks([len(chunks)], torch.device("cpu"))
        padded = [*chunks, *[self._dummy] * (max(1, num_passes) - len(chunks))]
        with torch.no_grad():
            rows = restore_order([self.encoder(*chunk.inputs) for chunk in padded], padded)
        reshard(self.encoder)
        return Guide(rows[:num_queries], rows[num_queries:])


def load_guides(
    paths: Sequence[str], parallel: ParallelConfig, world: World, *, chunk_tokens: int, trust_remote_code: bool
) -> tuple[dict[str, GuideModel], list[str]]:
    """Load the guides of a loss, by path or ID@REVISION, with a note about each. Every rank must call."""
    guides, notes = {}, []
    for path in paths:
        name, revision = split_revision(path)
        options = ModelConfig(path=name, revision=revision, trust_remote_code=trust_remote_code)
        try:
            loaded = load_model(options, parallel, world, seed=0)
        except (ConfigError, ModelError) as error:
            reason = str(error).removeprefix(f"model.path={name}: ")
            raise ConfigError(
                f"the loss's guide or teacher {path}: {reason} (it has to be a sentence-transformers model)"
            ) from None
        prompts = loaded.source.prompts
        texts = GuideTokenizer(loaded.tokenizer, prompts.get("query", ""), prompts.get("document", ""), chunk_tokens)
        guides[path] = GuideModel(loaded.encoder, texts, world)
        notes.append(f"the loss's guide or teacher {path}: {loaded.notes[0]}")
    return guides, notes
