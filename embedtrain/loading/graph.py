"""Opens a graph of an export in place of its weights, for commands that encode texts or score pairs.

N: texts; L: tokens of a padded text; V: words; D: dimensions of a vector.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.checkpoint.export.graph_outputs import (
    HIDDEN,
    LOGITS,
    M3_DENSE,
    M3_LEXICAL,
    M3_TOKENS,
    TOKEN_VECTORS,
    VECTORS,
    output_names,
)
from embedtrain.checkpoint.export.graph_session import open_graph
from embedtrain.checkpoint.export.onnx import GRAPH
from embedtrain.checkpoint.export.onnx_variants import FILES
from embedtrain.checkpoint.export.reopen import add_heads
from embedtrain.config.evaluation import Backend
from embedtrain.config.recipe import ModelKind, Strategy
from embedtrain.data.types import Packing, QueryWords
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.loading.bound_tokenizer import bound_tokenizer
from embedtrain.loading.load import LoadedModel
from embedtrain.models.encoder import Encoder
from embedtrain.models.m3 import m3_rows
from embedtrain.models.static_queries import QueryWeights, read_query_weights
from embedtrain.models.tokenizer import load_tokenizer
from embedtrain.models.types import ModelSource


def load_graph(source: ModelSource, backend: Backend, world: World) -> LoadedModel:
    """The model of an export whose outputs its graph computes, on the CPU of every rank. A collective.

    Raises ConfigError if the directory does not have the graph, CheckpointError if onnxruntime cannot open it.
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
        self._source, self._session = source, open_graph(path)
        self._heads = add_heads(nn.Identity(), source) if output_names(source) == [HIDDEN] else None
        self._queries: QueryWeights | None = None
        if source.words is not None and source.words.queries is not None:
            weights = read_query_weights(source.words.queries, source.directory, source.dimension)
            self._queries = QueryWeights(source.dimension, trained=False)
            self._queries.weight.data.copy_(weights)

    @property
    def dimension(self) -> int:
        """D, the dimension of the vectors; V of a sparse model."""
        return self._source.dimension

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        pooled: Tensor | None = None,
        packing: Packing | None = None,
        types: Tensor | None = None,
        more: Tensor | QueryWords | None = None,
    ) -> Tensor:
        """Arguments and result of the encoder of this kind of model; `more` is its last argument."""
        assert packing is None, "graphs have padded texts"
        real = torch.ones_like(ids) if mask is None else mask
        inputs = {"input_ids": ids, "attention_mask": real}
        inputs["token_type_ids"] = torch.zeros_like(ids) if types is None else types
        match self._source.kind:
            case ModelKind.cross_encoder:
                return self._run([LOGITS], inputs)[0]
            case ModelKind.sparse:
                assert more is None or isinstance(more, QueryWords)
                return self._with_queries(self._run([VECTORS], inputs)[0], more)
            case ModelKind.late_interaction:
                assert isinstance(more, Tensor)
                return self._run([TOKEN_VECTORS], inputs)[0].flatten(0, 1)[more]
            case ModelKind.m3:
                assert isinstance(more, Tensor)
                return self._m3_rows(inputs, pooled, more)
            case ModelKind.dense:
                if self._heads is None:
                    return self._run([VECTORS], inputs)[0]
                return self._heads.vectors(self._run([HIDDEN], inputs)[0], real if pooled is None else pooled)

    def _run(self, names: list[str], inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        device = inputs["input_ids"].device
        outputs = self._session.run(names, {name: values.cpu().numpy() for name, values in inputs.items()})
        return [torch.from_numpy(output).to(device) for output in outputs]

    def _with_queries(self, weights: Tensor, query_words: QueryWords | None) -> Tensor:
        """The weights of words in documents, and in queries that are not encoded: [N, V]."""
        if self._queries is None or query_words is None:
            return weights
        looked_up, _ = self._queries(query_words)
        return torch.cat([weights, looked_up]).index_select(0, query_words.order)

    def _m3_rows(self, inputs: dict[str, Tensor], pooled: Tensor | None, token_rows: Tensor) -> Tensor:
        dense, lexical, tokens = self._run([M3_DENSE, M3_LEXICAL, M3_TOKENS], inputs)
        weights = lexical.flatten()[token_rows]
        if pooled is not None:
            weights = weights * pooled.flatten()[token_rows]
        vectors = F.pad(tokens, (0, 0, 1, 0)).flatten(0, 1)[token_rows]
        texts = token_rows // inputs["input_ids"].shape[1]
        return m3_rows(dense[texts], vectors, weights, texts, inputs["input_ids"].flatten()[token_rows])
