"""Other files of an ONNX graph: fp16 weights, dynamic int8 quantization with scales per channel, and OpenVINO's format.

The names are those of optimum, sentence-transformers and transformers.js. Each file is run on the probe texts, and an
export with a file whose outputs are too far from those of the fp32 graph is rejected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.recipe import ONNX, ONNX_FP16, ONNX_INT8, OPENVINO
from embedtrain.errors import CheckpointError
from embedtrain.formats.graph_outputs import LOGITS, compared_names
from embedtrain.formats.onnx import (
    GRAPH,
    MAX_GRAPH_BYTES,
    OpenGraph,
    ProbeRows,
    batched_rows,
    save_with_weights_beside,
    silence,
)
from embedtrain.models.hub import one_line
from embedtrain.models.types import ModelSource
from embedtrain.utils.formatting import format_bytes

_MEASURES = {
    "dense": "smallest cosine of a vector",
    "cross_encoder": "1 - largest difference of a probability",
    "late_interaction": "smallest mean cosine of the vectors of a text",
    "sparse": "smallest cosine of the weights of words",
    "m3": "smallest cosine of dense vectors, lexical weights and vectors of tokens (mean of a text)",
}
FILES = {
    ONNX_FP16: "onnx/model_fp16.onnx",
    ONNX_INT8: "onnx/model_quantized.onnx",
    OPENVINO: "openvino/openvino_model.xml",
}


@dataclass(frozen=True, slots=True)
class GraphVariant:
    """A file and how close its outputs are to those of the fp32 graph."""

    file: str
    num_bytes: int  # with its separate weights
    agreement: float  # see `write_variants`
    metrics: Mapping[str, float] = field(default_factory=dict)


# Metrics by their names, of the graph of a format in the directory of the model.
GraphMeasure = Callable[[ModelSource, str], Mapping[str, float]]


def write_variants(
    directory: Path,
    source: ModelSource,
    formats: Sequence[str],
    min_agreement: float,
    measure: GraphMeasure | None = None,
) -> list[GraphVariant]:
    """Write the files that `formats` requests, from the fp32 graph in `directory`.

    With `measure`, the fp32 graph is the first of the result, and each is measured; it may raise CheckpointError.

    The agreement is the smallest cosine of a vector of PROBES with that of the fp32 graph; of vectors of tokens, the
    mean over those of a text; of a cross-encoder, 1 minus the largest difference of the probabilities. Raises
    CheckpointError if one is below `min_agreement`.
    """
    expected: ProbeRows | None = None
    batch = batched_rows(source)
    variants = []
    if measure is not None:
        variants.append(GraphVariant(GRAPH, _num_bytes(directory / GRAPH), 1.0, measure(source, ONNX)))
    for name in (name for name in FILES if name in formats):
        path = directory / FILES[name]
        try:
            with silence():
                _WRITERS[name](directory / GRAPH, path)
        except Exception as error:  # onnx and onnxruntime raise many types
            raise CheckpointError(
                f"the graph of this {source.config.model_type} model cannot be converted to {path.name}: "
                f"{one_line(error)} (leave {name} out of formats)"
            ) from error
        if expected is None:
            expected = OpenGraph(directory / GRAPH, source).run(batch)
        agreement = _agreement(OpenGraph(path, source).run(batch), expected, source)
        if not agreement >= min_agreement:  # also true of NaN
            raise CheckpointError(
                f"{path}: {_MEASURES[source.kind.name]}, compared with {GRAPH}, is {agreement:.4f}, below "
                f"onnx_min_agreement={min_agreement}; leave {name} out of formats, or lower the bound"
            )
        metrics = {} if measure is None else measure(source, name)
        variants.append(GraphVariant(FILES[name], _num_bytes(path), agreement, metrics))
    return variants


def _agreement(outputs: ProbeRows, expected: ProbeRows, source: ModelSource) -> float:
    if source.kind.name == "cross_encoder":
        scores, references = (torch.cat(rows[LOGITS]).float().sigmoid() for rows in (outputs, expected))
        return 1 - float((scores - references).abs().max())
    cosines = [
        _mean_cosine(rows.float(), references.float())
        for name in compared_names(source)
        for rows, references in zip(outputs[name], expected[name], strict=True)
    ]
    return float(torch.tensor(cosines).min())  # NaN if one is


def _mean_cosine(rows: Tensor, references: Tensor) -> float:
    if rows.equal(references):  # a text without words has no cosine
        return 1.0
    return float(F.cosine_similarity(rows, references, dim=1).mean())


def variant_table(variants: Sequence[GraphVariant], source: ModelSource) -> str:
    """A paragraph of the model card; empty without variants."""
    if not variants:
        return ""
    metrics = list(variants[0].metrics)
    rows = "\n".join(
        f"| `{variant.file}` | {format_bytes(variant.num_bytes)} | {variant.agreement:.4f} |"
        + "".join(f" {variant.metrics[name]:.4f} |" for name in metrics)
        for variant in variants
    )
    names, lines = "".join(f" {name} |" for name in metrics), " ---: |" * len(metrics)
    return (
        f"\n## Other graphs\n\nCompared with `{GRAPH}` on texts of several lengths and scripts.\n\n"
        f"| file | size | {_MEASURES[source.kind.name]} |{names}\n| --- | ---: | ---: |{lines}\n{rows}\n"
    )


def _num_bytes(path: Path) -> int:
    files = (path, path.with_name(f"{path.name}_data"), path.with_suffix(".bin"))
    return sum(file.stat().st_size for file in files if file.exists())


def _write_fp16(graph: Path, path: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load(str(graph)), keep_io_types=True)
    if _is_large(graph, 2):
        save_with_weights_beside(model, path)
    else:
        onnx.save_model(model, str(path))


def _write_int8(graph: Path, path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        graph, path, per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=_is_large(graph, 4)
    )


def _write_openvino(graph: Path, path: Path) -> None:
    import openvino

    path.parent.mkdir()
    openvino.save_model(openvino.convert_model(str(graph)), str(path), compress_to_fp16=False)


_WRITERS = {ONNX_FP16: _write_fp16, ONNX_INT8: _write_int8, OPENVINO: _write_openvino}


def _is_large(graph: Path, factor: int) -> bool:
    """Whether weights of 1 / factor of the size may exceed one file."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*")) / factor >= MAX_GRAPH_BYTES
