"""Opens a graph on the CPU: an ONNX file in onnxruntime, or OpenVINO's in OpenVINO.

A graph is a program: it may have loops without an end, and other inputs and outputs than an export.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.errors import CheckpointError
from embedtrain.models.file_references import require_own_file
from embedtrain.models.hub import one_line

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Of a run, and in addition for each token; 8B parameters need 0.3 s for a token on two slow cores.
_RUN_SECONDS, _TOKEN_SECONDS = 60.0, 1.0


class GraphSession(ABC):
    """An open graph with its inputs, all of which are the tokenizer's, and its outputs by name."""

    def __init__(self, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.path, self.inputs, self._outputs = path, inputs, outputs
        for name in inputs:
            if name not in _INPUTS:
                raise CheckpointError(f"{path} has the input {name!r:.200}; inputs of texts are {', '.join(_INPUTS)}")

    def run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """These outputs of the graph; of `inputs`, those that it does not have are left out.

        Raises CheckpointError if it does not have these outputs, its library cannot run it, or it needs more than a
        minute and a second for each token.
        """
        for name in names:
            if name not in self._outputs:
                present = f"it has {', '.join(self._outputs):.200}"
                raise CheckpointError(f"{self.path} has no output {name}, which this model needs: {present}")
        try:
            outputs = self._run(names, {name: inputs[name] for name in self.inputs})
        except CheckpointError:
            raise
        except Exception as error:  # their exceptions have no common base
            raise CheckpointError(f"{library_of(self.path)} cannot run {self.path}: {one_line(error)}") from error
        for name, output in zip(names, outputs, strict=True):
            if not isinstance(output, np.ndarray) or output.dtype.kind != "f":
                raise CheckpointError(f"{self.path}: its output {name} is not a tensor of floating-point numbers")
        return outputs

    @abstractmethod
    def _run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]: ...


def open_graph(path: Path, directory: Path) -> GraphSession:
    """Open a graph of a model directory with as many threads as torch uses.

    Raises CheckpointError if its library cannot, or it is no graph of texts; ModelError if it leads out of `directory`.
    """
    for file in (path, path.with_suffix(".bin")) if path.suffix == ".xml" else (path,):
        require_own_file(file, directory)
    try:
        return _OpenVino(path) if path.suffix == ".xml" else _OnnxRuntime(path)
    except CheckpointError:
        raise
    except Exception as error:  # their exceptions have no common base
        raise CheckpointError(f"{library_of(path)} cannot open {path}: {one_line(error)}") from error


def library_of(path: Path) -> str:
    """What runs a graph, for messages."""
    return "OpenVINO" if path.suffix == ".xml" else "onnxruntime"


class _OnnxRuntime(GraphSession):
    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [[node.name for node in nodes] for nodes in (self._session.get_inputs(), self._session.get_outputs())]
        super().__init__(path, *names)

    def _run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.log_severity_level = 4  # its errors are raised
        seconds = _RUN_SECONDS + _TOKEN_SECONDS * next((ids.size for ids in inputs.values()), 0)
        timer = threading.Timer(seconds, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            outputs: Sequence[NDArray[Any]] = self._session.run(list(names), dict(inputs), options)
        except Exception:
            if options.terminate:
                raise CheckpointError(f"{self.path} needs more than {seconds:g} s for these texts") from None
            raise
        finally:
            timer.cancel()
        return outputs


class _OpenVino(GraphSession):
    def __init__(self, path: Path) -> None:
        import openvino

        # By default it computes in bf16 where the CPU does.
        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        core = openvino.Core()
        model = core.read_model(str(path))
        _require_no_loops(model, path)
        self._model = core.compile_model(model, "CPU", options)
        super().__init__(
            path, *([_name(port) for port in ports] for ports in (self._model.inputs, self._model.outputs))
        )

    def _run(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        outputs = self._model(dict(inputs))
        return [outputs[self._model.output(name)] for name in names]


def _name(port: Any) -> str:
    with contextlib.suppress(RuntimeError):  # it has none
        return str(port.any_name)
    return ""


def _require_no_loops(model: Any, path: Path) -> None:
    """OpenVINO (2026.4) cannot be stopped within a loop; exports are traced, and have none."""
    graphs = [model]
    while graphs:
        for operation in graphs.pop().get_ops():
            kind = operation.get_type_name()
            if kind in ("Loop", "TensorIterator"):
                raise CheckpointError(f"{path} has a {kind}, which may never end; export the model again")
            if kind == "If":
                graphs += [operation.get_function(number) for number in range(2)]
