"""The ONNX graph of an export's backbone, and its verification with onnxruntime.

The graph is written to `onnx/model.onnx`, where `backend="onnx"` of sentence-transformers and optimum expect it. Inputs
are token ids and mask, the output is `last_hidden_state`, batch size and length are dynamic; pooling is not included.
Weights are always fp32, because few CPUs compute in less.
"""

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from embedtrain.checkpoint.export.verify import (
    PROBES,
    add_heads,
    encode_probes,
    open_encoder,
    open_tokenizer,
    require_close,
    tokenize_padded,
)
from embedtrain.errors import CheckpointError
from embedtrain.models.hub import one_line
from embedtrain.models.source import ModelSource

GRAPH = "onnx/model.onnx"
_WEIGHTS = "model.onnx_data"  # optimum's name for separate weights, if graph and weights exceed one protobuf
_MAX_GRAPH_BYTES = 2**31 - 2**24  # a protobuf is limited to 2 GiB
_OPSET = 18
_TOLERANCE = 1e-4


def write_graph(directory: Path, source: ModelSource) -> Tensor:
    """Write the graph of a directory; returns embeddings of PROBES by the traced model, [len(PROBES), D].

    Raises CheckpointError if the model cannot be expressed as a graph.
    """
    encoder, tokenizer = open_encoder(directory, source), open_tokenizer(directory, source)
    expected = encode_probes(encoder, tokenizer)
    backbone = encoder.backbone
    names = [name for name in tokenizer.model_input_names if name in inspect.signature(backbone.forward).parameters]
    # Two texts of different lengths, so that the trace does not assume a batch size of one or a mask of ones.
    batch = tokenize_padded(tokenizer, [PROBES[1], PROBES[4]])
    path = directory / GRAPH
    path.parent.mkdir()
    dynamic_axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    try:
        with _silence(), torch.no_grad():
            # By tracing: the newer exporter (dynamo=True) gives the same values for every architecture that we tried,
            # takes 10 to 40 times as long (torch 2.13), and needs another package.
            torch.onnx.export(
                _Backbone(backbone, names),
                tuple(batch[name] for name in names),
                str(path),
                input_names=names,
                output_names=["last_hidden_state"],
                dynamic_axes=dynamic_axes,
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # torch raises many types for what it cannot trace
        raise CheckpointError(
            f"this {source.config.model_type} model cannot be written as an ONNX graph: {one_line(error)} "
            "(remove onnx from formats; checkpoints can be exported again at any time)"
        ) from error
    del backbone, encoder
    _gather_weights(path)
    return expected


def check_graph(directory: Path, source: ModelSource, expected: Tensor) -> float:
    """Run the graph on PROBES one by one and as a padded batch; the largest relative difference of its embeddings.

    Raises CheckpointError if onnxruntime cannot run it, or its embeddings differ from those of `write_graph`.
    """
    import onnxruntime

    path = directory / GRAPH
    tokenizer, heads = open_tokenizer(directory, source), add_heads(nn.Identity(), source)

    def encode(texts: list[str]) -> Tensor:
        batch = tokenize_padded(tokenizer, texts)
        feed = {node.name: batch[node.name].numpy() for node in session.get_inputs()}
        with torch.no_grad():
            return heads.vectors(torch.from_numpy(session.run(["last_hidden_state"], feed)[0]), batch["attention_mask"])

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        single = torch.cat([encode([text]) for text in PROBES])
        batched = encode(list(PROBES))
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise CheckpointError(f"onnxruntime cannot run {path}: {one_line(error)}") from error
    subject = f"onnxruntime opens {path} (a {source.config.model_type} model)"
    return max(
        require_close(single, expected, _TOLERANCE, subject),
        require_close(batched, expected, _TOLERANCE, f"{subject} and runs a padded batch"),
    )


class _Backbone(nn.Module):
    """The backbone as a function from tensors, in the order of `names`, to a tensor."""

    def __init__(self, backbone: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Tensor = self.backbone(**dict(zip(self._names, inputs, strict=True))).last_hidden_state
        return hidden


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
