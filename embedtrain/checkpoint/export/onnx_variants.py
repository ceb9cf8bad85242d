"""Smaller files of an ONNX graph: fp16 weights, and dynamic int8 quantization with scales per channel.

The names are those of optimum and transformers.js. Each file is run on the probe texts, and an export with a file
whose outputs are too far from those of the fp32 graph is rejected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from embedtrain.checkpoint.export.onnx import GRAPH, MAX_GRAPH_BYTES, OpenGraph, save_with_weights_beside, silence
from embedtrain.checkpoint.export.verify import PROBES
from embedtrain.config.recipe import ONNX_FP16, ONNX_INT8
from embedtrain.errors import CheckpointError
from embedtrain.formatting import format_bytes
from embedtrain.models.hub import one_line
from embedtrain.models.types import ModelSource

FILES = {ONNX_FP16: "onnx/model_fp16.onnx", ONNX_INT8: "onnx/model_quantized.onnx"}


@dataclass(frozen=True, slots=True)
class GraphVariant:
    """A file and how close its outputs are to those of the fp32 graph."""

    file: str
    num_bytes: int  # with its separate weights
    agreement: float  # see `write_variants`


def write_variants(
    directory: Path, source: ModelSource, formats: Sequence[str], min_agreement: float
) -> list[GraphVariant]:
    """Write the files that `formats` requests, from the fp32 graph in `directory`.

    The agreement is the smallest cosine of a vector of PROBES with that of the fp32 graph; of a cross-encoder, 1 minus
    the largest difference of the probabilities. Raises CheckpointError if one is below `min_agreement`.
    """
    expected: torch.Tensor | None = None
    variants = []
    for name in (name for name in FILES if name in formats):
        path = directory / FILES[name]
        try:
            with silence():
                (_write_fp16 if name == ONNX_FP16 else _write_int8)(directory / GRAPH, path)
        except Exception as error:  # onnx and onnxruntime raise many types
            raise CheckpointError(
                f"the graph of this {source.config.model_type} model cannot be converted to {path.name}: "
                f"{one_line(error)} (leave {name} out of formats)"
            ) from error
        if expected is None:
            expected = OpenGraph(directory / GRAPH, source).run(range(len(PROBES)))[-1]
        outputs = OpenGraph(path, source).run(range(len(PROBES)))[-1].float()
        if source.head is None:
            agreement = float(F.cosine_similarity(outputs, expected.float(), dim=1).min())
        else:
            agreement = 1 - float((outputs.sigmoid() - expected.sigmoid()).abs().max())
        if not agreement >= min_agreement:  # also true of NaN
            measure = (
                "the smallest cosine to the vectors" if source.head is None else "1 - the difference to the scores"
            )
            raise CheckpointError(
                f"{path}: {measure} of {GRAPH} is {agreement:.4f}, below onnx_min_agreement={min_agreement}; leave "
                f"{name} out of formats, or lower the bound"
            )
        files = (path, path.with_name(f"{path.name}_data"))
        num_bytes = sum(file.stat().st_size for file in files if file.exists())
        variants.append(GraphVariant(FILES[name], num_bytes, agreement))
    return variants


def variant_table(variants: Sequence[GraphVariant], source: ModelSource) -> str:
    """A paragraph of the model card; empty without variants."""
    if not variants:
        return ""
    measure = "smallest cosine" if source.head is None else "1 - largest difference of a probability"
    rows = "\n".join(f"| `{each.file}` | {format_bytes(each.num_bytes)} | {each.agreement:.4f} |" for each in variants)
    return (
        f"\n## Smaller ONNX files\n\nCompared with `{GRAPH}` on {len(PROBES)} texts of several lengths and scripts.\n\n"
        f"| file | size | {measure} |\n| --- | ---: | ---: |\n{rows}\n"
    )


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


def _is_large(graph: Path, factor: int) -> bool:
    """Whether weights of 1 / factor of the size may exceed one file."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*")) / factor >= MAX_GRAPH_BYTES
