"""The ONNX graph of an export, and its verification with onnxruntime.

The graph is written to `onnx/model.onnx`, where `backend="onnx"` of sentence-transformers and optimum expect it. Inputs
are what the tokenizer returns, such as token ids and mask; batch size and length are dynamic. The outputs of an
embedding model are `last_hidden_state`, for clients that pool themselves, and `sentence_embedding`, its vectors: after
pooling, dense heads, normalisation and truncation. That of a cross-encoder is `logits` [N, 1], with the head. Weights
are always fp32, because few CPUs compute in less.
"""

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BatchEncoding, PreTrainedTokenizerBase

from embedtrain.checkpoint.export.cross_encoder import formatted_pairs, open_checked
from embedtrain.checkpoint.export.reopen import add_heads, open_encoder, open_tokenizer, tokenize_padded
from embedtrain.checkpoint.export.verify import PROBES, encode_probes, require_close
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.models.encoder import Encoder
from embedtrain.models.hub import one_line
from embedtrain.models.static_embedding import is_static
from embedtrain.models.types import ModelSource

GRAPH = "onnx/model.onnx"
MAX_GRAPH_BYTES = 2**31 - 2**24  # a protobuf is limited to 2 GiB
_OPSET = 18
_HIDDEN, _VECTORS = "last_hidden_state", "sentence_embedding"
_TOLERANCE = 1e-4


def require_graph(source: ModelSource) -> None:
    """Raise a ConfigError if a model cannot be written as a graph."""
    if is_static(source.config):
        raise ConfigError(
            "export.formats: onnx is for transformers, and this is a table of static embeddings; leave it out"
        )


def write_graph(directory: Path, source: ModelSource) -> Tensor:
    """Write the graph of a directory; returns what the traced model computes of PROBES.

    These are embeddings [len(PROBES), D], or the scores [1, len(PROBES)] of a cross-encoder. Raises CheckpointError if
    the model cannot be expressed as a graph.
    """
    require_graph(source)
    tokenizer = open_tokenizer(directory, source)
    outputs = output_names(source)
    model: nn.Module
    encoder = None
    if source.head is None:
        encoder = open_encoder(directory, source)
        expected, model = encode_probes(encoder, tokenizer), encoder.backbone
    else:
        model = open_checked(AutoModelForSequenceClassification, directory, source).eval()
        with torch.no_grad():
            batches = (_probe_batch(tokenizer, source, [row]) for row in range(len(PROBES)))
            expected = torch.cat([model(**batch).logits for batch in batches]).T
    names = [name for name in tokenizer.model_input_names if name in inspect.signature(model.forward).parameters]
    # Two texts of different lengths, so that the trace does not assume a batch size of one or a mask of ones.
    batch = _probe_batch(tokenizer, source, [1, 4])
    path = directory / GRAPH
    path.parent.mkdir()
    dynamic_axes = {name: {0: "batch", 1: "length"} for name in names}
    dynamic_axes |= {name: {0: "batch", 1: "length"} if name == _HIDDEN else {0: "batch"} for name in outputs}
    pooled = encoder if _VECTORS in outputs else None
    try:
        with silence(), torch.no_grad():
            # By tracing: the newer exporter (dynamo=True) gives the same values for every architecture that we tried,
            # takes 10 to 40 times as long (torch 2.13), and needs another package.
            torch.onnx.export(
                _Traced(model, names, outputs[0], pooled, source.truncate_dim),
                tuple(batch[name] for name in names),
                str(path),
                input_names=names,
                output_names=outputs,
                dynamic_axes=dynamic_axes,
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # torch raises many types for what it cannot trace
        raise CheckpointError(
            f"this {source.config.model_type} model cannot be written as an ONNX graph: {one_line(error)} "
            "(remove onnx from formats; checkpoints can be exported again at any time)"
        ) from error
    del model, encoder, pooled
    _gather_weights(path)
    return expected


def check_graph(directory: Path, source: ModelSource, expected: Tensor) -> float:
    """Run the graph on PROBES one by one and as a padded batch; the largest relative difference of what it computes.

    Raises CheckpointError if onnxruntime cannot run it, or it computes something else than `write_graph` returned.
    """
    path, rows = directory / GRAPH, range(len(PROBES))
    graph = OpenGraph(path, source)
    single = [torch.cat(outputs) for outputs in zip(*(graph.run([row]) for row in rows), strict=True)]
    batched = graph.run(rows)
    differences = []
    for texts, results in (("", single), (" and runs a padded batch", batched)):
        for name, result in zip(output_names(source), results, strict=True):
            values = result if source.head is None else result.T
            reference = expected[:, : source.truncate_dim] if name == _VECTORS else expected
            subject = f"onnxruntime opens {path} (a {source.config.model_type} model, output {name}){texts}"
            differences.append(require_close(values, reference, _TOLERANCE, subject))
    return max(differences)


class OpenGraph:
    """A graph in onnxruntime, on the CPU. Raises CheckpointError if onnxruntime cannot open or run it."""

    def __init__(self, path: Path, source: ModelSource) -> None:
        import onnxruntime

        assert source.directory is not None
        self._path, self._source = path, source
        self._tokenizer = open_tokenizer(source.directory, source)
        self._heads = add_heads(nn.Identity(), source) if source.head is None else None
        with self._explained():
            self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(self, rows: Sequence[int]) -> list[Tensor]:
        """These rows of PROBES as one padded batch: vectors of each output, or the scores [N, 1] of a cross-encoder."""
        batch = _probe_batch(self._tokenizer, self._source, rows)
        with self._explained():
            feed = {node.name: batch[node.name].numpy() for node in self._session.get_inputs()}
            outputs = self._session.run(output_names(self._source), feed)
        first, *vectors = (torch.from_numpy(output) for output in outputs)
        if self._heads is None:
            return [first]
        with torch.no_grad():
            return [self._heads.vectors(first, batch["attention_mask"]), *vectors]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise CheckpointError(f"onnxruntime cannot run {self._path}: {one_line(error)}") from error


def output_names(source: ModelSource) -> list[str]:
    """The outputs of the graph; a client that takes the first one pools itself.

    A late-interaction model has no vector of a text, and without the tokens of the prompt (`include_prompt=false`) the
    graph would need a mask that no client passes.
    """
    if source.head is not None:
        return ["logits"]
    has_vectors = source.token_vectors is None and (source.include_prompt or not any(source.prompts.values()))
    return [_HIDDEN, _VECTORS] if has_vectors else [_HIDDEN]


def _probe_batch(tokenizer: PreTrainedTokenizerBase, source: ModelSource, rows: Sequence[int]) -> BatchEncoding:
    """These rows of PROBES, or of the pairs of them that a cross-encoder is compared on, as one padded batch."""
    if source.head is None:
        return tokenize_padded(tokenizer, [PROBES[row] for row in rows])
    queries, documents = zip(*(formatted_pairs(source, PROBES)[row] for row in rows), strict=True)
    return tokenize_padded(tokenizer, list(queries), list(documents))


class _Traced(nn.Module):
    """A model as a function from tensors, in the order of `names`, to the tensor `output`.

    With an encoder that the model is the backbone of, it also returns the vectors of the texts.
    """

    def __init__(
        self, model: nn.Module, names: list[str], output: str, encoder: Encoder | None, truncate_dim: int | None
    ) -> None:
        super().__init__()
        self.model, self.encoder = model, encoder
        self._names, self._output, self._truncate_dim = names, output, truncate_dim

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        values = dict(zip(self._names, inputs, strict=True))
        output: Tensor = self.model(**values)[self._output]
        if self.encoder is None:
            return output
        return output, self.encoder.vectors(output, values["attention_mask"])[:, : self._truncate_dim]


def _gather_weights(path: Path) -> None:
    """Move large weights to one file beside the graph; torch writes one file per weight."""
    import onnx

    weights = [file for file in path.parent.iterdir() if file != path]
    if not weights and path.stat().st_size < MAX_GRAPH_BYTES:
        return
    model = onnx.load(str(path))
    for file in weights:
        file.unlink()
    save_with_weights_beside(model, path)


def save_with_weights_beside(model: Any, path: Path) -> None:
    """Save an onnx.ModelProto as a graph and one file of weights, which optimum names after the graph."""
    import onnx

    onnx.save_model(
        model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=f"{path.name}_data"
    )


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress the converters' warnings about shapes and ranges: the comparison detects what is wrong."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(disabled)
