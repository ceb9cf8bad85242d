"""What the ONNX graph of each kind of model computes, and what of it is compared.

N: texts; L: tokens of a padded text; H: hidden size; D: dimensions of a vector; V: words; R: vectors of a text.
"""

import inspect
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from embedtrain.config.kinds import load_kind
from embedtrain.config.sparse import SparseActivation, SparsePooling
from embedtrain.formats.cross_encoder import open_checked
from embedtrain.formats.reopen import add_heads, open_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.late_interaction import LateInteractionEncoder
from embedtrain.models.m3 import M3Encoder
from embedtrain.models.sparse_encoder import language_model_class
from embedtrain.models.types import ModelSource
from embedtrain.models.word_weights import WordWeights

# The first name of each kind is that of transformers' class, whose output optimum and sentence-transformers read; the
# second one is sentence-transformers' own. The last three are FlagEmbedding's.
HIDDEN, LOGITS = "last_hidden_state", "logits"
VECTORS, TOKEN_VECTORS = "sentence_embedding", "token_embeddings"
M3_DENSE, M3_LEXICAL, M3_TOKENS = "dense_vecs", "sparse_vecs", "colbert_vecs"
_M3 = [M3_DENSE, M3_LEXICAL, M3_TOKENS]
# The axes besides the batch whose sizes depend on the texts.
_LENGTHS = {HIDDEN: "length", TOKEN_VECTORS: "length", M3_LEXICAL: "length", M3_TOKENS: "length_without_first"}


def output_names(source: ModelSource) -> list[str]:
    """The outputs of the graph; a client that takes the first one pools itself.

    Without the tokens of the prompt (`include_prompt=false`) the graph would need a mask that no client passes.
    """
    match source.kind.name:
        case "cross_encoder":
            return [LOGITS]
        case "sparse":
            return [LOGITS, VECTORS]
        case "late_interaction":
            return [HIDDEN, TOKEN_VECTORS]
        case "m3":
            return [HIDDEN, VECTORS, *_M3]
        case _:
            has_vectors = source.include_prompt or not any(source.prompts.values())
            return [HIDDEN, VECTORS] if has_vectors else [HIDDEN]


def compared_names(source: ModelSource) -> list[str]:
    """The outputs by which a smaller graph is compared: the model's own, with everything applied."""
    return _M3 if source.kind.name == "m3" else output_names(source)[-1:]


def dynamic_axes(source: ModelSource, inputs: list[str]) -> dict[str, dict[int, str]]:
    """The names of the axes of inputs and outputs whose sizes are not fixed."""
    axes = {name: {0: "batch", 1: "length"} for name in inputs}
    for name in output_names(source):
        axes[name] = {0: "batch"} | ({1: _LENGTHS[name]} if name in _LENGTHS else {})
    if source.kind.name == "sparse":
        axes[LOGITS] = {0: "batch", 1: "length"}
    return axes


class TracedModel(nn.Module):
    """The fp32 model of a directory as a function from tensors, in the order of `inputs`, to its outputs."""

    def __init__(self, directory: Path, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._source = source
        self.encoder: Encoder | None = None
        self.model: nn.Module
        if source.kind.name == "cross_encoder":
            self.model = open_checked(AutoModelForSequenceClassification, directory, source).eval()
        elif source.kind.name == "sparse":
            self.model = open_checked(language_model_class(source.config), directory, source).eval()
        else:
            self.encoder = open_encoder(directory, source)
            self.model = self.encoder.backbone
        parameters = inspect.signature(self.model.forward).parameters
        self.inputs = [name for name in tokenizer.model_input_names if name in parameters]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Token ids and others, [N, L] each, to the outputs in the order of `output_names`."""
        values = dict(zip(self.inputs, tensors, strict=True))
        output, mask = self.model(**values), values["attention_mask"]
        if self.encoder is None:
            logits = output.logits
            words = self._source.settings
            return (logits,) if self._source.kind.name != "sparse" else (logits, pooled_words(logits, mask, words))
        hidden = output.last_hidden_state
        if isinstance(self.encoder, LateInteractionEncoder):
            return hidden, self.encoder.token_vectors(hidden)
        if VECTORS not in output_names(self._source):
            return (hidden,)
        vectors = self.encoder.vectors(hidden, mask)
        if isinstance(self.encoder, M3Encoder):
            tokens = self.encoder.token_vectors(hidden[:, 1:]) * mask[:, 1:, None]
            return hidden, vectors, vectors.clone(), self.encoder.lexical_weights(hidden), tokens
        return hidden, vectors[:, : self._source.truncate_dim]


def pooled_words(logits: Tensor, mask: Tensor, words: WordWeights) -> Tensor:
    """Weights of words [N, V] from the logits of all tokens [N, L, V]; a weight is at least 0."""
    weights = logits.relu().log1p()
    if words.activation is SparseActivation.log1p_relu:
        weights = weights.log1p()
    weights = weights * mask.unsqueeze(-1)
    return weights.amax(dim=1) if words.pooling is SparsePooling.max else weights.sum(dim=1)


class ComparedOutputs:
    """Reduces outputs to what a client makes of them, text by text, without padding."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        of_vectors = replace(source, kind=load_kind("dense"), settings=None) if source.kind.name == "m3" else source
        # The dense vector of three representations is that of any model of one vector.
        has_hidden = HIDDEN in output_names(source)
        self._heads = add_heads(nn.Identity(), of_vectors) if has_hidden else None

    def rows(self, name: str, output: Tensor, mask: Tensor) -> list[Tensor]:
        """Of each text [R, D] from an output of N texts with the mask [N, L]; a row of numbers of its tokens [1, L]."""
        real = mask.bool()
        if name == HIDDEN:
            assert self._heads is not None
            with torch.no_grad():
                vectors: Tensor = self._heads.vectors(output, mask)
            sizes = (
                real.sum(dim=1) if self._source.kind.name == "late_interaction" else torch.ones_like(real[:, 0]).long()
            )
            return list(vectors.split(sizes.tolist()))
        if name == LOGITS and self._source.kind.name == "sparse":
            output = pooled_words(output, mask, self._source.settings)
        if name == TOKEN_VECTORS:
            return [row[is_real] for row, is_real in zip(output, real, strict=True)]
        if name == M3_TOKENS:
            return [row[is_real] for row, is_real in zip(output, real[:, 1:], strict=True)]
        if name == M3_LEXICAL:
            return [row[is_real].T for row, is_real in zip(output, real, strict=True)]
        return list(output.split(1))

    def joined(self, name: str, rows: list[Tensor]) -> Tensor:
        """The rows of texts as one matrix; single numbers as one row: one near 0 has no relative difference."""
        return torch.cat(rows, dim=1 if name == M3_LEXICAL or self._source.kind.name == "cross_encoder" else 0)
