"""Opens a graph on the CPU: an ONNX file in onnxruntime, or OpenVINO's in OpenVINO."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from embedtrain.errors import CheckpointError
from embedtrain.models.hub import one_line


class GraphSession(Protocol):
    """An open graph."""

    inputs: Sequence[str]

    def run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """These outputs of the graph; of `inputs`, those that it does not have are left out."""
        ...


def open_graph(path: Path) -> GraphSession:
    """Open a graph with as many threads as torch uses. Raises CheckpointError if its library cannot."""
    try:
        return _OpenVino(path) if path.suffix == ".xml" else _OnnxRuntime(path)
    except Exception as error:  # their exceptions have no common base
        raise CheckpointError(f"{library_of(path)} cannot open {path}: {one_line(error)}") from error


def library_of(path: Path) -> str:
    """What runs a graph, for messages."""
    return "OpenVINO" if path.suffix == ".xml" else "onnxruntime"


class _OnnxRuntime:
    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs: Sequence[str] = [node.name for node in self._session.get_inputs()]

    def run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        outputs: Sequence[NDArray[Any]] = self._session.run(list(names), {name: inputs[name] for name in self.inputs})
        return outputs


class _OpenVino:
    def __init__(self, path: Path) -> None:
        import openvino

        # By default it computes in bf16 where the CPU does.
        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._model = openvino.compile_model(str(path), "CPU", options)
        self.inputs: Sequence[str] = [port.any_name for port in self._model.inputs]

    def run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        outputs = self._model({name: inputs[name] for name in self.inputs})
        return [outputs[self._model.output(name)] for name in names]
