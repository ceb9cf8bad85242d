"""Model directories of BGE-M3: sentence-transformers' of the dense vector, and FlagEmbedding's two layers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedtrain.config.recipe import ExportConfig
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.formats.flag_embedding import LAYERS, write_m3_layer, write_m3_settings
from embedtrain.formats.model_files import (
    HIDDEN,
    VECTORS,
    ModelFiles,
    ServingOutputs,
    StoredName,
    python_block,
    rows_by_text,
)
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.dense.files import DenseFiles
from embedtrain.kinds.m3.model import M3Head, m3_rows
from embedtrain.kinds.m3.score import split_rows
from embedtrain.losses.encoded import Part
from embedtrain.models.encoder import Encoder
from embedtrain.models.types import ModelSource

# FlagEmbedding's names of what it computes.
M3_DENSE, M3_LEXICAL, M3_TOKENS = "dense_vecs", "sparse_vecs", "colbert_vecs"
_OUTPUTS = [M3_DENSE, M3_LEXICAL, M3_TOKENS]


class M3Files(DenseFiles):
    """A dense model, and beside it `colbert_linear.pt`, `sparse_linear.pt` and the same as safetensors."""

    plural = "models of three representations"
    description = (
        "A model of three representations of a text of up to {max_length} tokens, in the manner of BGE-M3: a vector of "
        "{dimension} dimensions, a weight of each token, and a vector of each token"
    )
    tags = ("sentence-similarity", "feature-extraction", "multi-vector", "sparse", "bge-m3")
    task = "feature-extraction"
    graph = (
        "from token ids to `last_hidden_state`, `dense_vecs` (also named `sentence_embedding`), `sparse_vecs`, the "
        "lexical weight of each token, and `colbert_vecs`, the vectors of all tokens but the first"
    )
    agreement = "smallest cosine of dense vectors, lexical weights and vectors of tokens (mean of a text)"

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """The dense model, and settings of the layers."""
        write_m3_settings(directory, source.settings)
        super().write(directory, source, tokenizer)

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """sentence-transformers and FlagEmbedding."""
        return [
            "sentence-transformers computes the vector of a text, FlagEmbedding all three representations:",
            "",
            *super().usage(name, prompts, architecture),
            *python_block(
                "from FlagEmbedding import BGEM3FlagModel",
                "",
                f'model = BGEM3FlagModel("{name}")',
                'model.encode(["a text"], return_dense=True, return_sparse=True, return_colbert_vecs=True)',
            ),
        ]

    def check_export(self, config: ExportConfig, kind: str) -> None:
        """The vectors have one size."""
        ModelFiles.check_export(self, config, kind)

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """A file of each layer."""
        names = list(names)
        split = {name: name.split(".", 1) for name in names if name.startswith(LAYERS)}
        layers = {name: StoredName(key, f"{layer}.safetensors") for name, (layer, key) in split.items()}
        return super().stored_names(names, architecture) | layers

    def finish_weights(self, directory: Path) -> None:
        """The layers as FlagEmbedding reads them."""
        for name in LAYERS:
            write_m3_layer(directory / f"{name}.pt", load_file(directory / f"{name}.safetensors"))

    def probe(
        self,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        prompts: Mapping[str, str],
        device: torch.device,
    ) -> Tensor:
        """The dense vector, the mean of the token vectors, and the mean lexical weight: [N, D + d + 1]."""
        assert isinstance(encoder.output, M3Head)
        settings, tokens, outputs = encoder.output.settings, tokenizer.tokens(PROBES), []
        for row in range(len(tokens)):
            with torch.no_grad():
                rows = encoder(tokenizer.chunk(tokens, [row]).to(device))[0].cpu()
            means = rows[1:, : settings.token_dimension].mean(dim=0), rows[:, -1].mean(dim=0, keepdim=True)
            outputs.append(torch.cat([rows[0, : settings.dimension], *means]))
        return torch.stack(outputs)

    def probe_opened(self, encoder: Encoder, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """`probe` with the tokens of the kind's own."""
        return ModelFiles.probe_opened(self, encoder, source, tokenizer)

    def num_computed(self, source: ModelSource) -> int | None:
        """The dense vector."""
        return source.dimension

    def serving_facts(self, source: ModelSource, *, has_graph: bool) -> dict[str, bool]:
        """The pooling is always that of the first token."""
        return {}

    def serving_outputs(self, part: Part, source: ModelSource, way: str) -> ServingOutputs:
        """The three representations; lexical weights as those of all words."""
        parts = split_rows(part, source.settings)
        lexical = []
        for text in range(len(part)):
            own = parts.lexical.slice(text, text + 1)
            assert own.ids is not None
            weights = np.zeros(int(source.config.get_text_config().vocab_size), dtype=np.float32)
            np.maximum.at(weights, own.ids.cpu().numpy(), own.values[:, 0].cpu().numpy())
            lexical.append(weights)
        dense, tokens = list(parts.dense.values.cpu().numpy()), rows_by_text(parts.tokens)
        return {"vectors": {way: dense}, "word_weights": {way: lexical}, "token_vectors": {way: tokens}}

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """The dense vector under two names."""
        own = {M3_DENSE: None, M3_LEXICAL: "length", M3_TOKENS: "length_without_first"}
        return {HIDDEN: "length", VECTORS: None} | own

    def own_outputs(self, source: ModelSource) -> list[str]:
        """FlagEmbedding's."""
        return _OUTPUTS

    def traced(self, source: ModelSource, encoder: Encoder | None, output: Any, mask: Tensor) -> tuple[Tensor, ...]:
        """The three representations."""
        return ModelFiles.traced(self, source, encoder, output, mask)

    def graph_shapes(self, source: ModelSource, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """FlagEmbedding's outputs."""
        tokens = (texts, length - 1, source.settings.token_dimension)
        return {M3_DENSE: (texts, source.dimension), M3_LEXICAL: (texts, length, 1), M3_TOKENS: tokens}

    def open_rest(self, source: ModelSource) -> nn.Module | None:
        """All is in the graph."""
        return None

    def from_graph(
        self,
        source: ModelSource,
        rest: nn.Module | None,
        outputs: Sequence[Tensor],
        chunk: Chunk,
    ) -> Tensor:
        """The rows of the real tokens, see `m3_rows`."""
        (dense, lexical, tokens), token_rows = outputs, chunk.token_rows
        assert token_rows is not None
        assert chunk.row_ids is not None
        weights = lexical.flatten()[token_rows]
        if chunk.pooled is not None:
            weights = weights * chunk.pooled.flatten()[token_rows]
        vectors = F.pad(tokens, (0, 0, 1, 0)).flatten(0, 1)[token_rows]
        texts = token_rows // chunk.ids.shape[1]
        return m3_rows(dense[texts], vectors, weights, texts, chunk.row_ids)

    def reduce(self, source: ModelSource, name: str, output: Tensor, mask: Tensor) -> list[Tensor]:
        """A row of the lexical weights of a text, [1, L]."""
        real = mask.bool()
        if name == HIDDEN:
            return super().reduce(source, name, output, mask)
        if name == M3_TOKENS:
            return [row[is_real] for row, is_real in zip(output, real[:, 1:], strict=True)]
        if name == M3_LEXICAL:
            return [row[is_real].T for row, is_real in zip(output, real, strict=True)]
        return list(output.split(1))

    def joined(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """Lexical weights as one row: one near 0 has no relative difference."""
        return torch.cat(list(rows), dim=1 if name == M3_LEXICAL else 0)
