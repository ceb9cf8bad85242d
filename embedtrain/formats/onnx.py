"""The ONNX graph of an export, and its verification with onnxruntime.

The graph is written to `onnx/model.onnx`, where `backend="onnx"` of sentence-transformers and optimum expect it. Inputs
are what the tokenizer returns, such as token ids and mask; batch size and length are dynamic. Outputs are those of the
class of transformers, for clients that pool themselves, and those of the model with everything applied, see
`graph_outputs`. Weights are always fp32, because few CPUs compute in less.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.cross_encoder import formatted_pairs
from embedtrain.formats.graph_outputs import ComparedOutputs, TracedModel, dynamic_axes, output_names
from embedtrain.formats.graph_session import open_graph
from embedtrain.formats.reopen import open_tokenizer, tokenize_padded
from embedtrain.formats.verify import PROBES, require_close
from embedtrain.models.attention_mask import traceable_masks
from embedtrain.models.hub import one_line
from embedtrain.models.static_embedding import is_static
from embedtrain.models.types import ModelSource

GRAPH = "onnx/model.onnx"
MAX_GRAPH_BYTES = 2**31 - 2**24  # a protobuf is limited to 2 GiB
_OPSET = 18
_TOLERANCE = 1e-4

# Of each output by its name, what is compared of each of PROBES: [R, D].
ProbeRows = dict[str, list[Tensor]]


def require_graph(source: ModelSource) -> None:
    """Raise a ConfigError if a model cannot be written as a graph."""
    if is_static(source.config):
        raise ConfigError(
            "export.formats: onnx is for transformers, and this is a table of static embeddings; leave it out"
        )


def write_graph(directory: Path, source: ModelSource) -> ProbeRows:
    """Write the graph of a directory; returns what the traced model computes of PROBES, one by one.

    Raises CheckpointError if the model cannot be expressed as a graph.
    """
    require_graph(source)
    tokenizer = open_tokenizer(directory, source)
    model, compared = TracedModel(directory, source, tokenizer), ComparedOutputs(source)
    outputs = output_names(source)
    expected: ProbeRows = {name: [] for name in outputs}
    with torch.no_grad():
        for row in range(len(PROBES)):
            batch = _probe_batch(tokenizer, source, [row])
            for name, values in zip(outputs, model(*(batch[name] for name in model.inputs)), strict=True):
                expected[name] += compared.rows(name, values, batch["attention_mask"])
    # Two texts of different lengths, so that the trace does not assume a batch size of one or a mask of ones.
    batch = _probe_batch(tokenizer, source, [1, 4])
    path = directory / GRAPH
    path.parent.mkdir()
    try:
        with silence(), torch.no_grad(), traceable_masks():
            # By tracing: the newer exporter (dynamo=True) gives the same values for every architecture that we tried,
            # takes 10 to 40 times as long (torch 2.13), and needs another package.
            torch.onnx.export(
                model,
                tuple(batch[name] for name in model.inputs),
                str(path),
                input_names=model.inputs,
                output_names=outputs,
                dynamic_axes=dynamic_axes(source, model.inputs),
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


def check_graph(directory: Path, source: ModelSource, expected: ProbeRows) -> float:
    """Run the graph on PROBES one by one and as a padded batch; the largest relative difference of what it computes.

    Raises CheckpointError if onnxruntime cannot run it, or it computes something else than `write_graph` returned.
    """
    graph, compared, rows = OpenGraph(directory / GRAPH, source), ComparedOutputs(source), range(len(PROBES))
    single = [graph.run([row]) for row in rows]
    batch = batched_rows(source)
    batched = graph.run(batch)
    differences = []
    for name in output_names(source):
        subject = f"onnxruntime opens {graph.path} (a {source.config.model_type} model, output {name})"
        reference = compared.joined(name, expected[name])
        values = compared.joined(name, [text for outputs in single for text in outputs[name]])
        differences.append(require_close(values, reference, _TOLERANCE, subject))
        reference = compared.joined(name, [expected[name][row] for row in batch])
        values = compared.joined(name, batched[name])
        differences.append(require_close(values, reference, _TOLERANCE, f"{subject} and runs a padded batch"))
    return max(differences)


def batched_rows(source: ModelSource) -> range:
    """Those of PROBES that are run as one batch.

    Of a sparse model all but the longest: its graph has logits of all words for each token, and for padding as well.
    """
    return range(len(PROBES) - (source.kind.name == "sparse"))


class OpenGraph:
    """A graph on the CPU. Raises CheckpointError if its library cannot open or run it."""

    def __init__(self, path: Path, source: ModelSource) -> None:
        assert source.directory is not None
        self.path, self._source = path, source
        self._tokenizer, self._compared = open_tokenizer(source.directory, source), ComparedOutputs(source)
        self._session = open_graph(path, source.directory)

    def run(self, rows: Sequence[int]) -> ProbeRows:
        """These rows of PROBES as one padded batch."""
        batch, names = _probe_batch(self._tokenizer, self._source, rows), output_names(self._source)
        outputs = self._session.run(names, {name: values.numpy() for name, values in batch.items()})
        mask = batch["attention_mask"]
        return {
            name: self._compared.rows(name, torch.from_numpy(output), mask)
            for name, output in zip(names, outputs, strict=True)
        }


def _probe_batch(tokenizer: PreTrainedTokenizerBase, source: ModelSource, rows: Sequence[int]) -> BatchEncoding:
    """These rows of PROBES, or of the pairs of them that a cross-encoder is compared on, as one padded batch."""
    if source.kind.name != "cross_encoder":
        return tokenize_padded(tokenizer, [PROBES[row] for row in rows])
    queries, documents = zip(*(formatted_pairs(source, PROBES)[row] for row in rows), strict=True)
    return tokenize_padded(tokenizer, list(queries), list(documents))


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
