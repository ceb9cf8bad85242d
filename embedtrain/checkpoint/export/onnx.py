"""An export's backbone as an ONNX graph beside its weights, and the comparison of the two in onnxruntime.

The graph is `onnx/model.onnx`, where sentence-transformers' `backend="onnx"` and optimum look for it: token ids and
mask in, `last_hidden_state` out, batch and length free. Pooling and what follows stay with whoever runs it. Its weights
are fp32 whatever the directory's are, for few processors compute in less.
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
    encode_batch,
    open_encoder,
    open_tokenizer,
    require_close,
    tokenize_padded,
)
from embedtrain.errors import CheckpointError
from embedtrain.models.hub import one_line
from embedtrain.models.source import ModelSource

GRAPH = "onnx/model.onnx"
_WEIGHTS = "model.onnx_data"  # beside it, as optimum calls it, where both do not fit into one protobuf
_MAX_GRAPH_BYTES = 2**31 - 2**24  # bytes; a protobuf ends at 2 GiB
_OPSET = 18
_TOLERANCE = 1e-4


def write_graph(directory: Path, source: ModelSource) -> Tensor:
    """Write the graph of a directory that transformers opens.

    Args:
        directory: with weights and tokenizer.
        source: the same, opened.

    Returns:
        The vectors of PROBES by the model that was traced, [len(PROBES), D].

    Raises:
        CheckpointError: the model does something that no graph can express.
        OSError: the directory cannot be written.
    """
    encoder, tokenizer = open_encoder(directory, source), open_tokenizer(directory, source)
    expected = torch.cat([encode_batch(encoder, tokenize_padded(tokenizer, [text])) for text in PROBES])
    backbone = encoder.backbone
    names = [name for name in tokenizer.model_input_names if name in inspect.signature(backbone.forward).parameters]
    # Two texts of different lengths, so that neither a batch of one nor a mask of ones is taken for granted.
    batch = tokenize_padded(tokenizer, [PROBES[1], PROBES[4]])
    path = directory / GRAPH
    path.parent.mkdir()
    free = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    try:
        with _silence(), torch.no_grad():
            # By tracing: the newer exporter (dynamo=True) gives the same figures for every architecture that was tried,
            # takes 10 to 40 times as long (torch 2.13), and needs a package more.
            torch.onnx.export(
                _Backbone(backbone, names),
                tuple(batch[name] for name in names),
                str(path),
                input_names=names,
                output_names=["last_hidden_state"],
                dynamic_axes=free,
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # torch raises nearly anything of what it cannot trace
        raise CheckpointError(
            f"this {source.config.model_type} model cannot be written as an ONNX graph: {one_line(error)} "
            "(leave onnx out of formats; checkpoints and architecture can be exported again at any time)"
        ) from error
    del backbone, encoder
    _gather_weights(path)
    return expected


def check_graph(directory: Path, source: ModelSource, expected: Tensor) -> float:
    """Run the graph on PROBES one by one and as one padded batch; the largest relative difference of its vectors.

    Args:
        directory: with the graph.
        source: the same, opened.
        expected: vectors of PROBES by the model that was traced, [len(PROBES), D].

    Raises:
        CheckpointError: onnxruntime cannot open it, or its vectors are others.
    """
    import onnxruntime

    path = directory / GRAPH
    tokenizer, heads = open_tokenizer(directory, source), add_heads(nn.Identity(), source)

    def vectors(texts: list[str]) -> Tensor:
        batch = tokenize_padded(tokenizer, texts)
        feed = {given.name: batch[given.name].numpy() for given in session.get_inputs()}
        with torch.no_grad():
            return heads.vectors(torch.from_numpy(session.run(["last_hidden_state"], feed)[0]), batch["attention_mask"])

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        alone = torch.cat([vectors([text]) for text in PROBES])
        together = vectors(list(PROBES))
    except Exception as error:  # onnxruntime has exceptions of its own, without a root
        raise CheckpointError(f"onnxruntime cannot run {path}: {one_line(error)}") from error
    told = f"onnxruntime opens {path} (a {source.config.model_type} model)"
    return max(
        require_close(alone, expected, _TOLERANCE, told),
        require_close(together, expected, _TOLERANCE, f"{told} and runs a padded batch"),
    )


class _Backbone(nn.Module):
    """The backbone as a function of tensors, in the order of their names, to a tensor."""

    def __init__(self, backbone: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Tensor = self.backbone(**dict(zip(self._names, inputs, strict=True))).last_hidden_state
        return hidden


def _gather_weights(path: Path) -> None:
    """Large weights in one file beside the graph; torch writes a file for each."""
    import onnx

    apart = [file for file in path.parent.iterdir() if file != path]
    if not apart and path.stat().st_size < _MAX_GRAPH_BYTES:
        return
    model = onnx.load(str(path))
    for file in apart:
        file.unlink()
    onnx.save_model(model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=_WEIGHTS)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without the notes of a tracer on every shape it meets: what it got wrong is found by comparing."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
