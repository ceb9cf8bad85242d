"""Opens a graph of an export in place of its weights, for commands that encode texts or score pairs.

N: texts; L: tokens of a padded text; V: words; D: dimensions of a vector.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.config.evaluation import Backend
from embedtrain.config.recipe import Strategy
from embedtrain.data.types import Chunk, QueryWords
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.graph_outputs import (
    HIDDEN,
    LOGITS,
    M3_DENSE,
    M3_LEXICAL,
    M3_TOKENS,
    TOKEN_VECTORS,
    VECTORS,
    output_names,
)
from embedtrain.formats.graph_session import open_graph
from embedtrain.formats.onnx import GRAPH
from embedtrain.formats.onnx_variants import FILES
from embedtrain.formats.reopen import add_heads
from embedtrain.inference.loading.bound_tokenizer import bound_tokenizer
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.models.encoder import Encoder, hidden_size
from embedtrain.models.m3 import m3_rows
from embedtrain.models.static_queries import QueryWeights, read_query_weights
from embedtrain.models.tokenizer import load_tokenizer
from embedtrain.models.types import ModelSource


def load_graph(source: ModelSource, backend: Backend, world: World) -> LoadedModel:
    """The model of an export whose outputs its graph computes, on the CPU of every rank. A collective.

    Raises ConfigError if the directory does not have the graph, CheckpointError if it cannot be opened or is that of
    another model.
    """
    with world.fail_together("opening the graph"):
        path = graph_file(source, backend)
        if not path.is_file():
            formats = ",".join(dict.fromkeys((Backend.onnx.value, backend.value)))
            raise ConfigError(f"backend={backend.value}: {path} is missing; export with formats=[{formats}]")
        bound = bound_tokenizer(source, load_tokenizer(source)).with_packing(False)
        encoder = GraphEncoder(path, source)
    return LoadedModel(
        encoder=encoder.eval(),
        source=replace(source, tokenization=replace(source.tokenization, max_length=bound.max_length)),
        tokenizer=bound,
        layout=ParallelLayout(Strategy.ddp, world.size, 1, "a graph is whole on every rank"),
        notes=(
            f"{FILES.get(backend.value, GRAPH)} in onnxruntime, on the CPU, {bound.longest_text} tokens",
            *bound.notes,
        ),
        precision=backend.value,
        reduce_per_step=False,
    )


def graph_file(source: ModelSource, backend: Backend) -> Path:
    """Where the export of the model has the graph."""
    assert source.directory is not None
    return source.directory / FILES.get(backend.value, GRAPH)


class GraphEncoder(Encoder):
    """Padded tokens of texts, or pairs, to what the model's own encoder returns of them.

    Args:
        path: of the graph, in the directory of `source`.
    """

    def __init__(self, path: Path, source: ModelSource) -> None:
        super().__init__(nn.Identity(), source.pooling, normalize=source.normalize)
        assert source.directory is not None
        self._source, self._session = source, open_graph(path, source.directory)
        self._heads = add_heads(nn.Identity(), source) if output_names(source) == [HIDDEN] else None
        self._queries: QueryWeights | None = None
        if source.kind.name == "sparse" and source.settings.queries is not None:
            weights = read_query_weights(source.settings.queries, source.directory, source.dimension)
            self._queries = QueryWeights(source.dimension, trained=False)
            self._queries.weight.data.copy_(weights)
        # A text of two tokens, so that a graph of something else fails before texts are read.
        ids = torch.zeros(1, 2, dtype=torch.int64)
        self._run(self._inputs(Chunk(ids, torch.ones_like(ids), has_padding=False)))

    @property
    def dimension(self) -> int:
        """D, the dimension of the vectors; V of a sparse model."""
        return self._source.dimension

    def forward(self, chunk: Chunk) -> Tensor:
        """What the encoder of this kind of model returns of a chunk."""
        assert chunk.packing is None, "graphs have padded texts"
        inputs = self._inputs(chunk)
        outputs = self._run(inputs)
        match self._source.kind.name:
            case "cross_encoder":
                return outputs[0]
            case "sparse":
                return self._with_queries(outputs[0], chunk.query_words)
            case "late_interaction":
                assert chunk.token_rows is not None
                return outputs[0].flatten(0, 1)[chunk.token_rows]
            case "m3":
                return self._m3_rows(chunk, outputs)
            case _:
                if self._heads is None:
                    return outputs[0]
                return self._heads.vectors(outputs[0], chunk.mask if chunk.pooled is None else chunk.pooled)

    def _inputs(self, chunk: Chunk) -> dict[str, Tensor]:
        return {
            "input_ids": chunk.ids,
            "attention_mask": chunk.mask,
            "token_type_ids": torch.zeros_like(chunk.ids) if chunk.types is None else chunk.types,
        }

    def _run(self, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        """The outputs that `forward` reads, of the shapes that an export has, or a CheckpointError."""
        ids = inputs["input_ids"]
        shapes = self._output_shapes(*ids.shape)
        outputs = self._session.run(list(shapes), {name: values.cpu().numpy() for name, values in inputs.items()})
        for (name, shape), output in zip(shapes.items(), outputs, strict=True):
            if output.shape != shape:
                raise CheckpointError(
                    f"{self._session.path}: its output {name} has the shape {list(output.shape)} for "
                    f"{list(ids.shape)} tokens; that of the model is {list(shape)}"
                )
        return [torch.from_numpy(output).to(ids.device) for output in outputs]

    def _output_shapes(self, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """Of the outputs that are read, for padded texts."""
        dimension = self._source.dimension
        match self._source.kind.name:
            case "cross_encoder":
                return {LOGITS: (texts, dimension)}
            case "sparse":
                return {VECTORS: (texts, dimension)}
            case "late_interaction":
                return {TOKEN_VECTORS: (texts, length, dimension)}
            case "m3":
                assert self._source.kind.name == "m3"
                tokens = (texts, length - 1, self._source.settings.token_dimension)
                return {M3_DENSE: (texts, dimension), M3_LEXICAL: (texts, length, 1), M3_TOKENS: tokens}
            case "dense" if self._heads is not None:
                return {HIDDEN: (texts, length, hidden_size(self._source.config))}
            case _:
                return {VECTORS: (texts, min(dimension, self._source.truncate_dim or dimension))}

    def _with_queries(self, weights: Tensor, query_words: QueryWords | None) -> Tensor:
        """The weights of words in documents, and in queries that are not encoded: [N, V]."""
        if self._queries is None or query_words is None:
            return weights
        looked_up, _ = self._queries(query_words)
        return torch.cat([weights, looked_up]).index_select(0, query_words.order)

    def _m3_rows(self, chunk: Chunk, outputs: Sequence[Tensor]) -> Tensor:
        (dense, lexical, tokens), token_rows = outputs, chunk.token_rows
        assert token_rows is not None
        weights = lexical.flatten()[token_rows]
        if chunk.pooled is not None:
            weights = weights * chunk.pooled.flatten()[token_rows]
        vectors = F.pad(tokens, (0, 0, 1, 0)).flatten(0, 1)[token_rows]
        texts = token_rows // chunk.ids.shape[1]
        return m3_rows(dense[texts], vectors, weights, texts, chunk.ids.flatten()[token_rows])
