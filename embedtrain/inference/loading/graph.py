"""Opens a graph of an export in place of its weights, for commands that encode texts or score pairs.

N: texts; L: tokens of a padded text; V: words; D: dimensions of a vector.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from embedtrain.config.evaluation import Backend
from embedtrain.config.recipe import Pooling, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.onnx import FILES, GRAPH, open_graph
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.inference.loading.load import LoadedModel, bound_tokenizer
from embedtrain.models.encoder import Encoder, PooledHead
from embedtrain.models.types import ModelSource


def load_graph(source: ModelSource, backend: Backend, world: World) -> LoadedModel:
    """The model of an export whose outputs its graph computes, on the CPU of every rank. A collective.

    Raises ConfigError if the directory does not have the graph, CheckpointError if it cannot be opened or is that of
    another model.
    """
    with world.fail_together("opening the graph"):
        if not source.kind.files.graph_outputs(source):
            raise ConfigError(f"backend={backend.value}: {source.kind.files.no_graph(source)}; write torch")
        path = graph_file(source, backend)
        if not source.kind.files.graph_shapes(source, 1, 2):
            raise ConfigError(
                f"backend={backend.value}: model.kind={source.kind.name} does not say how the outputs of its graph are "
                "read; write torch"
            )
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
            *bound.layout.notes,
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
        # The graph computes what a backbone and this head would.
        super().__init__(nn.Identity(), PooledHead(source.dimension, Pooling.cls, normalize=False))
        assert source.directory is not None
        self._source, self._session = source, open_graph(path, source.directory)
        self._files = source.kind.files
        self._rest = self._files.open_rest(source)
        # A text of two tokens, so that a graph of something else fails before texts are read.
        ids = torch.zeros(1, 2, dtype=torch.int64)
        self._run(self._inputs(Chunk(ids, torch.ones_like(ids), has_padding=False)))

    @property
    def dimension(self) -> int:
        """D, the dimension of the vectors; V of a sparse model."""
        return self._source.dimension

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """What the encoder of this kind of model returns of a chunk."""
        assert chunk.packing is None, "graphs have padded texts"
        outputs = self._run(self._inputs(chunk))
        return (self._files.from_graph(self._source, self._rest, outputs, chunk),)

    def _inputs(self, chunk: Chunk) -> dict[str, Tensor]:
        return {
            "input_ids": chunk.ids,
            "attention_mask": chunk.mask,
            "token_type_ids": torch.zeros_like(chunk.ids) if chunk.types is None else chunk.types,
        }

    def _run(self, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        """The outputs that `forward` reads, of the shapes that an export has, or a CheckpointError."""
        ids = inputs["input_ids"]
        shapes = self._files.graph_shapes(self._source, *ids.shape)
        outputs = self._session.run(list(shapes), {name: values.cpu().numpy() for name, values in inputs.items()})
        for (name, shape), output in zip(shapes.items(), outputs, strict=True):
            if output.shape != shape:
                raise CheckpointError(
                    f"{self._session.path}: its output {name} has the shape {list(output.shape)} for "
                    f"{list(ids.shape)} tokens; that of the model is {list(shape)}"
                )
        return [torch.from_numpy(output).to(ids.device) for output in outputs]
