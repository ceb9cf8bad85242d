"""The table of a static embedding model, from a model that encodes every token of its vocabulary alone.

Source: Model2Vec (Tulkens and van Dongen, 2024); the weights of tokens are those of Arora et al., "A Simple but
Tough-to-Beat Baseline for Sentence Embeddings" (2017).

V: tokens of the vocabulary; V_r: those that rank r encodes; T: dimensions of the model; D: of the table.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain import __version__
from embedtrain.config.evaluation import check_kind_of_vectors
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ExportConfig, Pooling
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.data.types import TextRole, Tokens
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.formats.export import DerivedModel, ExportResult, write_derived
from embedtrain.formats.static_embedding import TABLE, StaticConfig, is_static
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.inference.principal_components import Moments, principal_components
from embedtrain.models.types import ModelSource, Tokenization, VectorSettings
from embedtrain.tracking.console import Console

if TYPE_CHECKING:
    from embedtrain.commands.static import StaticOptions

# Tokens that no text has, such as those of BERT and of Gemma.
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")
_PROBE = "a"


class SingleTokens(Layout):
    """Texts that are numbers of tokens: each is that token between the model's special tokens."""

    dummy = "0"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer.tokenizer)
        (whole,) = tokenizer.ids([_PROBE])
        alone = tokenizer.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        start = next((n for n in range(len(whole)) if whole[n : n + len(alone)] == alone), 0)
        self.before, self.after = whole[:start], whole[start + len(alone) :]

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of each text."""
        return Tokens.of([[*self.before, int(text), *self.after] for text in texts])


def require_distillable(source: ModelSource, options: "StaticOptions") -> None:
    """A ConfigError for a model of other outputs, without a transformer, of two, or with too few dimensions."""
    check_kind_of_vectors(source.kind, "model")
    if is_static(source.config):
        raise ConfigError(f"model={options.model}: is a static embedding model already; write a transformer")
    source.require_texts_alone(f"model={options.model}")
    source.require_dimensions([options.pca_dims], "pca_dims", truncated=True)


def require_fast_tokenizer(model: LoadedModel, options: "StaticOptions") -> None:
    """A ConfigError for a tokenizer in Python."""
    if not getattr(model.tokenizer.tokenizer, "is_fast", False):
        raise ConfigError(f"model={options.model}: its tokenizer has no tokenizer.json, which a static model needs")


def make_table(model: LoadedModel, options: "StaticOptions", world: World, console: Console) -> Tensor:
    """The table, float32 [V, D], the same on every rank. A collective.

    The principal components are those of the tokens that occur in texts, less their mean.
    """
    words = occurring_tokens(model.tokenizer.tokenizer)
    weights = sif_weights(words, options.sif_coefficient)
    encoder = SentenceEncoder.from_model(
        replace(model, tokenizer=model.tokenizer.with_layout(SingleTokens(model.tokenizer))),
        world,
        chunk_tokens=options.chunk_tokens,
        unshard=options.unshard,
    )
    texts, label = [str(number) for number in range(len(words))], "encoding the vocabulary"
    with console.phase(label), console.progress() as progress, encoder.report_progress(progress):
        blocks = list(encoder.encode_blocks(texts, label=label))
    vectors = torch.cat([block.part.values for block in blocks]).cpu()
    rows = torch.cat([block.rows for block in blocks])
    moments = Moments.of(vectors[torch.from_numpy(words)[rows]]).all_reduced(world)
    mean = moments.mean
    components, variances = principal_components(moments.covariance)
    dims = options.pca_dims or len(mean)
    console.note(
        f"{len(words):,} tokens of {len(mean)} dimensions: {dims} principal components have "
        f"{float(variances[:dims].sum() / variances.sum()):.1%} of their variance"
    )
    local = (vectors.double() - mean) @ components[:dims].T * weights[rows][:, None]
    gathered = gather_rows(local.float().to(world.device)).cpu()
    table = torch.empty_like(gathered)
    table[gather_rows(rows.to(world.device)).cpu()] = gathered
    return table


def occurring_tokens(tokenizer: PreTrainedTokenizerBase) -> NDArray[np.bool_]:
    """Bool [V], false for the special tokens, for unused ones, and for ids without a token."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    occurs = np.zeros(max(vocabulary.values()) + 1, dtype=np.bool_)
    for token, number in vocabulary.items():
        occurs[number] = number not in special and not _UNUSED.fullmatch(token)
    return occurs


def sif_weights(occurs: NDArray[np.bool_], coefficient: float | None) -> Tensor:
    """The weight a / (a + p) of each token, float64 [V], where p is proportional to 1 / rank; None: 1.

    The rank is that of the id: vocabularies begin with the most frequent tokens. Tokens that do not occur, the unknown
    one among them, weigh as the most frequent one.
    """
    if coefficient is None:
        return torch.ones(len(occurs), dtype=torch.float64)
    ranks = np.where(occurs, np.cumsum(occurs), 1)
    probabilities = 1.0 / ranks / (1.0 / np.arange(1, occurs.sum() + 1)).sum()
    return torch.from_numpy(coefficient / (coefficient + probabilities))


def write_table(
    table: Tensor, model: LoadedModel, options: "StaticOptions", output_dir: Path, console: Console
) -> ExportResult:
    """Write the directory, which replaces `output_dir` once sentence-transformers opens it with equal vectors."""
    source = ModelSource(
        kind=load_kind("dense"),
        directory=None,
        config=StaticConfig(vocab_size=len(table), hidden_size=table.shape[1]),
        vectors=VectorSettings(pooling=Pooling.mean),
        tokenization=Tokenization(max_length=options.max_length),
        prompts={"query": "", "document": ""},
    )
    texts = model.tokenizer.tokenizer
    tokenizer = TextTokenizer(texts, options.max_length, source.kind.layout(source, texts))
    weighted = "" if options.sif_coefficient is None else f", weighted by SIF (a={options.sif_coefficient:g})"
    description = (
        "a static embedding model. The vector of a text is the mean of those of its tokens, which are "
        f"{table.shape[1]} principal components of what {{}} computes of each token alone{weighted}, by embedtrain "
        f"{__version__}."
    )
    derived = DerivedModel(source, {TABLE: table}, tokenizer, options.model, description)
    settings = ExportConfig(dtype=options.dtype, check=options.check)
    return write_derived(derived, output_dir, settings, console, trust_remote_code=False)
