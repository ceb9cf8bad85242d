"""The ONNX graph of an export, and its verification with onnxruntime.

The graph is written to `onnx/model.onnx`, where `backend="onnx"` of sentence-transformers and optimum expect it. Inputs
are what the tokenizer returns, such as token ids and mask; batch size and length are dynamic. The output of an
embedding model is `last_hidden_state`, without pooling; that of a cross-encoder is `logits` [N, 1], with the head.
Weights are always fp32, because few CPUs compute in less.
"""

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BatchEncoding, PreTrainedTokenizerBase

from embedtrain.checkpoint.export.cross_encoder import formatted_pairs, open_checked
from embedtrain.checkpoint.export.reopen import add_heads, open_encoder, open_tokenizer, tokenize_padded
from embedtrain.checkpoint.export.verify import PROBES, encode_probes, require_close
from embedtrain.errors import CheckpointError
from embedtrain.models.hub import one_line
from embedtrain.models.types import ModelSource

GRAPH = "onnx/model.onnx"
_WEIGHTS = "model.onnx_data"  # optimum's name for separate weights, if graph and weights exceed one protobuf
_MAX_GRAPH_BYTES = 2**31 - 2**24  # a protobuf is limited to 2 GiB
_OPSET = 18
_TOLERANCE = 1e-4


def write_graph(directory: Path, source: ModelSource) -> Tensor:
    """Write the graph of a directory; returns what the traced model computes of PROBES.

    These are embeddings [len(PROBES), D], or the scores [1, len(PROBES)] of a cross-encoder. Raises CheckpointError if
    the model cannot be expressed as a graph.
    """
    tokenizer = open_tokenizer(directory, source)
    output = _output(source)
    model: nn.Module
    if source.head is None:
        encoder = open_encoder(directory, source)
        expected, model = encode_probes(encoder, tokenizer), encoder.backbone
        del encoder
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
    dynamic_axes[output] = {0: "batch", 1: "length"} if source.head is None else {0: "batch"}
    try:
        with _silence(), torch.no_grad():
            # By tracing: the newer exporter (dynamo=True) gives the same values for every architecture that we tried,
            # takes 10 to 40 times as long (torch 2.13), and needs another package.
            torch.onnx.export(
                _Traced(model, names, output),
                tuple(batch[name] for name in names),
                str(path),
                input_names=names,
                output_names=[output],
                dynamic_axes=dynamic_axes,
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # torch raises many types for what it cannot trace
        raise CheckpointError(
            f"this {source.config.model_type} model cannot be written as an ONNX graph: {one_line(error)} "
            "(remove onnx from formats; checkpoints can be exported again at any time)"
        ) from error
    del model
    _gather_weights(path)
    return expected


def check_graph(directory: Path, source: ModelSource, expected: Tensor) -> float:
    """Run the graph on PROBES one by one and as a padded batch; the largest relative difference of what it computes.

    Raises CheckpointError if onnxruntime cannot run it, or it computes something else than `write_graph` returned.
    """
    import onnxruntime

    path, rows = directory / GRAPH, range(len(PROBES))
    tokenizer = open_tokenizer(directory, source)
    heads = add_heads(nn.Identity(), source) if source.head is None else None

    def run(rows: Sequence[int]) -> Tensor:
        batch = _probe_batch(tokenizer, source, rows)
        feed = {node.name: batch[node.name].numpy() for node in session.get_inputs()}
        output = torch.from_numpy(session.run([_output(source)], feed)[0])
        if heads is None:
            return output
        with torch.no_grad():
            return heads.vectors(output, batch["attention_mask"])

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        single, batched = torch.cat([run([row]) for row in rows]), run(rows)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise CheckpointError(f"onnxruntime cannot run {path}: {one_line(error)}") from error
    if source.head is not None:
        single, batched = single.T, batched.T
    subject = f"onnxruntime opens {path} (a {source.config.model_type} model)"
    return max(
        require_close(single, expected, _TOLERANCE, subject),
        require_close(batched, expected, _TOLERANCE, f"{subject} and runs a padded batch"),
    )


def _output(source: ModelSource) -> str:
    return "last_hidden_state" if source.head is None else "logits"


def _probe_batch(tokenizer: PreTrainedTokenizerBase, source: ModelSource, rows: Sequence[int]) -> BatchEncoding:
    """These rows of PROBES, or of the pairs of them that a cross-encoder is compared on, as one padded batch."""
    if source.head is None:
        return tokenize_padded(tokenizer, [PROBES[row] for row in rows])
    queries, documents = zip(*(formatted_pairs(source, PROBES)[row] for row in rows), strict=True)
    return tokenize_padded(tokenizer, list(queries), list(documents))


class _Traced(nn.Module):
    """A model as a function from tensors, in the order of `names`, to the tensor `output`."""

    def __init__(self, model: nn.Module, names: list[str], output: str) -> None:
        super().__init__()
        self.model = model
        self._names, self._output = names, output

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.model(**dict(zip(self._names, inputs, strict=True)))[self._output]
        return output


def _gather_weights(path: Path) -> None:
    """Move large weights to one file beside the graph; torch writes one file per weight."""
    import onnx

    weights = [file for file in path.parent.iterdir() if file != path]
    if not weights and path.stat().st_size < _MAX_GRAPH_BYTES:
        return
    model = onnx.load(str(path))
    for file in weights:
        file.unlink()
    onnx.save_model(model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=_WEIGHTS)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the tracer's warnings about shapes: the comparison detects what it traced wrongly."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
