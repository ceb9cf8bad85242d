"""The ONNX graph of an export and smaller forms of it, and their verification with onnxruntime.

The graph is written to `onnx/model.onnx`, where `backend="onnx"` of sentence-transformers and optimum expect it. Inputs
are what the tokenizer returns, such as token ids and mask; batch size and length are dynamic. Outputs are those of the
class of transformers, for clients that pool themselves, and those of the model with everything applied, see
`ModelFiles.graph_outputs`. Weights are always fp32, because few CPUs compute in less.

Other files have fp16 weights, dynamic int8 quantization with scales per channel, or OpenVINO's format. The names are
those of optimum, sentence-transformers and transformers.js. Each file is run on the probe texts, and an export with a
file whose outputs are too far from those of the fp32 graph is rejected.

A graph that is opened is a program of somebody: it may have loops without an end, and other inputs and outputs than an
export.
"""

import contextlib
import inspect
import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedTokenizerBase

from embedtrain.config.recipe import ONNX, ONNX_FP16, ONNX_INT8, OPENVINO
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.model_files import ProbeRows, TowerGraph
from embedtrain.formats.transformers import open_tokenizer, tokenize_padded
from embedtrain.formats.verify import PROBES, require_close
from embedtrain.models.attention import traceable_masks
from embedtrain.models.encoder import Head
from embedtrain.models.file_references import require_own_file
from embedtrain.models.types import ModelSource
from embedtrain.utils.formatting import format_bytes, one_line

GRAPH = "onnx/model.onnx"
FILES = {
    ONNX_FP16: "onnx/model_fp16.onnx",
    ONNX_INT8: "onnx/model_quantized.onnx",
    OPENVINO: "openvino/openvino_model.xml",
}
MAX_GRAPH_BYTES = 2**31 - 2**24  # a protobuf is limited to 2 GiB
_OPSET = 18
GRAPH_TOLERANCE = 1e-4
# Metrics by their names, of the graph of a format in the directory of the model.
GraphMeasure = Callable[[ModelSource, str], Mapping[str, float]]
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Of a run, and in addition for each token; 8B parameters need 0.3 s for a token on two slow cores.
_RUN_SECONDS, _TOKEN_SECONDS = 60.0, 1.0


def require_graph(source: ModelSource) -> None:
    """Raise a ConfigError if a model cannot be written as a graph."""
    if not source.kind.files.is_transformers(source):
        raise ConfigError(
            "export.formats: onnx is for transformers, and this is a table of static embeddings; leave it out"
        )
    if source.kind.files.graph_names(source):
        return
    if not source.kind.files.graph_outputs(source):
        raise ConfigError(f"export.formats: {source.kind.files.no_graph(source)}; leave onnx out")
    with init_empty_weights():
        head = source.kind.head(source)
    if head is not None and type(head).graph_outputs is Head.graph_outputs:
        raise ConfigError(
            f"export.formats: model.kind={source.kind.name} has no ONNX graph, because {type(head).__name__} does not "
            "define graph_outputs; leave onnx out"
        )


class TracedModel(nn.Module):
    """The fp32 model of a directory as a function from tensors, in the order of `inputs`, to its outputs."""

    def __init__(self, directory: Path, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._source, self._files = source, source.kind.files
        self.encoder, self.model = self._files.open_traced(directory, source)
        parameters = inspect.signature(self.model.forward).parameters
        self.inputs = [name for name in tokenizer.model_input_names if name in parameters]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Token ids and others, [N, L] each, to the outputs in the order of `graph_outputs`."""
        values = dict(zip(self.inputs, tensors, strict=True))
        return self._files.traced(self._source, self.encoder, self.model(**values), values["attention_mask"])


def _dynamic_axes(outputs: Mapping[str, str | None], inputs: list[str]) -> dict[str, dict[int, str]]:
    """The names of the axes of inputs and outputs whose sizes are not fixed."""
    axes = {name: {0: "batch", 1: "length"} for name in inputs}
    return axes | {name: {0: "batch"} | ({1: second} if second else {}) for name, second in outputs.items()}


def write_graph(directory: Path, source: ModelSource) -> ProbeRows:
    """Write the graph of a directory; returns what the traced model computes of PROBES, one by one.

    Raises CheckpointError if the model cannot be expressed as a graph.
    """
    require_graph(source)
    files = source.kind.files
    if files.graph_names(source):
        return {graph.name: _write_tower(directory, source, graph) for graph in files.tower_graphs(directory, source)}
    tokenizer = open_tokenizer(directory, source)
    model, outputs = TracedModel(directory, source, tokenizer), files.graph_outputs(source)
    expected: ProbeRows = {name: [] for name in outputs}
    with torch.no_grad():
        for row in range(len(PROBES)):
            batch = _probe_batch(tokenizer, source, [row])
            for name, values in zip(outputs, model(*(batch[name] for name in model.inputs)), strict=True):
                expected[name] += files.reduce(source, name, values, batch["attention_mask"])
    # Two texts of different lengths, so that the trace does not assume a batch size of one or a mask of ones.
    batch = _probe_batch(tokenizer, source, [1, 4])
    inputs = {name: batch[name] for name in model.inputs}
    _trace(model, inputs, list(outputs), _dynamic_axes(outputs, model.inputs), directory / GRAPH, source)
    return expected


def _write_tower(directory: Path, source: ModelSource, graph: TowerGraph) -> list[Tensor]:
    """Write the graph of a tower; returns the vectors of its probes, one by one, each [1, D]."""
    *single, batch = graph.probes
    with torch.no_grad():
        expected = [graph.model(*(inputs[name] for name in graph.axes)) for inputs in single]
    axes = {name: dict(of_input) for name, of_input in graph.axes.items()} | {graph.output: {0: "batch"}}
    inputs = {name: batch[name] for name in graph.axes}
    _trace(graph.model, inputs, [graph.output], axes, _named(directory / GRAPH, graph.name), source)
    return expected


def _named(path: Path, name: str) -> Path:
    """The file of a tower in place of that of a whole model."""
    return path.with_name(path.name.replace("model", name, 1))


def _trace(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: list[str],
    axes: dict[str, dict[int, str]],
    path: Path,
    source: ModelSource,
) -> None:
    """Write a function of tensors as a graph, with its weights."""
    path.parent.mkdir(exist_ok=True)
    before = set(path.parent.iterdir())
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which is one operation that no graph has
    try:
        with silence(), torch.no_grad(), traceable_masks():
            # By tracing: the newer exporter (dynamo=True) gives the same values for every architecture that we tried,
            # takes 10 to 40 times as long (torch 2.13), and needs another package.
            torch.onnx.export(
                model,
                tuple(inputs.values()),
                str(path),
                input_names=list(inputs),
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # torch raises many types for what it cannot trace
        raise CheckpointError(
            f"this {source.config.model_type} model cannot be written as an ONNX graph: {one_line(error)} "
            "(remove onnx from formats; checkpoints can be exported again at any time)"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    _gather_weights(path, before)


def check_graph(directory: Path, source: ModelSource, expected: ProbeRows) -> float:
    """Run the graph on PROBES one by one and as a padded batch; the largest relative difference of what it computes.

    Raises CheckpointError if onnxruntime cannot run it, or it computes something else than `write_graph` returned.
    """
    if source.kind.files.graph_names(source):
        return _check_towers(directory, source, expected)
    graph, files = OpenGraph(directory / GRAPH, source), source.kind.files
    single = [graph.run([row]) for row in range(len(PROBES))]
    batch = files.batched_probes()
    batched = graph.run(batch)
    differences = []
    for name in files.graph_outputs(source):
        subject = f"onnxruntime opens {graph.path} (a {source.config.model_type} model, output {name})"
        reference = files.joined(name, expected[name])
        values = files.joined(name, [text for outputs in single for text in outputs[name]])
        differences.append(require_close(values, reference, GRAPH_TOLERANCE, subject))
        reference = files.joined(name, [expected[name][row] for row in batch])
        values = files.joined(name, batched[name])
        differences.append(require_close(values, reference, GRAPH_TOLERANCE, f"{subject} and runs a padded batch"))
    return max(differences)


def _check_towers(directory: Path, source: ModelSource, expected: ProbeRows) -> float:
    """The same of each tower."""
    differences = []
    for graph in source.kind.files.tower_graphs(directory, source):
        path = _named(directory / GRAPH, graph.name)
        subject = f"onnxruntime opens {path} (a {source.config.model_type} model)"
        reference, *single = torch.cat(expected[graph.name]), *_run_tower(path, directory, graph)
        differences.append(require_close(torch.cat(single[:-1]), reference, GRAPH_TOLERANCE, subject))
        differences.append(require_close(single[-1], reference, GRAPH_TOLERANCE, f"{subject} and runs a batch"))
    return max(differences)


def _run_tower(path: Path, directory: Path, graph: TowerGraph) -> list[Tensor]:
    """The vectors of each of a tower's probes, and of all as one batch."""
    session = open_graph(path, directory, list(graph.axes))
    return [
        torch.from_numpy(session.run([graph.output], {name: inputs[name].numpy() for name in graph.axes})[0])
        for inputs in graph.probes
    ]


class OpenGraph:
    """A graph on the CPU. Raises CheckpointError if its library cannot open or run it."""

    def __init__(self, path: Path, source: ModelSource) -> None:
        assert source.directory is not None
        self.path, self._source, self._files = path, source, source.kind.files
        self._tokenizer = open_tokenizer(source.directory, source)
        self._session = open_graph(path, source.directory)

    def run(self, rows: Sequence[int]) -> ProbeRows:
        """These rows of PROBES as one padded batch."""
        batch = _probe_batch(self._tokenizer, self._source, rows)
        names = list(self._files.graph_outputs(self._source))
        outputs = self._session.run(names, {name: values.numpy() for name, values in batch.items()})
        mask = batch["attention_mask"]
        return {
            name: self._files.reduce(self._source, name, torch.from_numpy(output), mask)
            for name, output in zip(names, outputs, strict=True)
        }


def _probe_batch(tokenizer: PreTrainedTokenizerBase, source: ModelSource, rows: Sequence[int]) -> BatchEncoding:
    """These rows of PROBES, or of the pairs of them that a cross-encoder is compared on, as one padded batch."""
    texts = source.kind.files.probe_texts(source)
    columns = [list(column) for column in zip(*(texts[row] for row in rows), strict=True)]
    return tokenize_padded(tokenizer, *columns)


def _gather_weights(path: Path, others: Collection[Path]) -> None:
    """Move large weights to one file beside the graph; torch writes one file per weight. `others` are other graphs'."""
    import onnx

    weights = [file for file in path.parent.iterdir() if file != path and file not in others]
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


@dataclass(frozen=True, slots=True)
class GraphVariant:
    """A file and how close its outputs are to those of the fp32 graph."""

    file: str
    num_bytes: int  # with its separate weights
    agreement: float  # see `write_variants`
    metrics: Mapping[str, float] = field(default_factory=dict)


def write_variants(
    directory: Path,
    source: ModelSource,
    formats: Sequence[str],
    min_agreement: float,
    measure: GraphMeasure | None = None,
) -> list[GraphVariant]:
    """Write the files that `formats` requests, from the fp32 graph in `directory`.

    With `measure`, the fp32 graph is the first of the result, and each is measured; it may raise CheckpointError.

    Raises CheckpointError if the agreement of one with the fp32 graph, which the kind of model measures, is below
    `min_agreement`.
    """
    expected: ProbeRows | None = None
    files = source.kind.files
    if files.graph_names(source):
        return _write_tower_variants(directory, source, formats, min_agreement)
    batch = files.batched_probes()
    variants = []
    if measure is not None:
        variants.append(GraphVariant(GRAPH, _num_bytes(directory / GRAPH), 1.0, measure(source, ONNX)))
    for name in (name for name in FILES if name in formats):
        path = directory / FILES[name]
        _convert(name, directory / GRAPH, path, source)
        if expected is None:
            expected = OpenGraph(directory / GRAPH, source).run(batch)
        agreement = files.measure_agreement(OpenGraph(path, source).run(batch), expected, source)
        _require_agreement(agreement, min_agreement, path, name, source)
        metrics = {} if measure is None else measure(source, name)
        variants.append(GraphVariant(FILES[name], _num_bytes(path), agreement, metrics))
    return variants


def _write_tower_variants(
    directory: Path, source: ModelSource, formats: Sequence[str], min_agreement: float
) -> list[GraphVariant]:
    """The same of each tower; the agreement is the smallest cosine of a vector."""
    variants = []
    for graph in source.kind.files.tower_graphs(directory, source):
        whole = _named(directory / GRAPH, graph.name)
        expected: Tensor | None = None
        for name in (name for name in FILES if name in formats):
            path = _named(directory / FILES[name], graph.name)
            _convert(name, whole, path, source)
            if expected is None:
                expected = _run_tower(whole, directory, graph)[-1]
            vectors = _run_tower(path, directory, graph)[-1]
            agreement = float(F.cosine_similarity(vectors.float(), expected, dim=1).min())
            _require_agreement(agreement, min_agreement, path, name, source)
            variants.append(GraphVariant(str(path.relative_to(directory)), _num_bytes(path), agreement))
    return variants


def _convert(name: str, graph: Path, path: Path, source: ModelSource) -> None:
    try:
        with silence():
            _WRITERS[name](graph, path)
    except Exception as error:  # onnx and onnxruntime raise many types
        raise CheckpointError(
            f"the graph of this {source.config.model_type} model cannot be converted to {path.name}: "
            f"{one_line(error)} (leave {name} out of formats)"
        ) from error


def _require_agreement(agreement: float, least: float, path: Path, name: str, source: ModelSource) -> None:
    if not agreement >= least:  # also true of NaN
        raise CheckpointError(
            f"{path}: {source.kind.files.agreement}, compared with the graph in fp32, is {agreement:.4f}, below "
            f"onnx_min_agreement={least}; leave {name} out of formats, or lower the bound"
        )


def variant_table(variants: Sequence[GraphVariant], source: ModelSource) -> str:
    """A paragraph of the model card; empty without variants."""
    if not variants:
        return ""
    measured, metrics = source.kind.files.agreement, list(variants[0].metrics)
    rows = "\n".join(
        f"| `{variant.file}` | {format_bytes(variant.num_bytes)} | {variant.agreement:.4f} |"
        + "".join(f" {variant.metrics[name]:.4f} |" for name in metrics)
        for variant in variants
    )
    names, lines = "".join(f" {name} |" for name in metrics), " ---: |" * len(metrics)
    graphs = source.kind.files.graph_names(source)
    compared = " and ".join(f"`{_named(Path(GRAPH), name)}`" for name in graphs or ["model"])
    pictures = " and drawn pictures" if graphs else ""
    return (
        f"\n## Other graphs\n\nCompared with {compared} on texts of several lengths and scripts{pictures}.\n\n"
        f"| file | size | {measured} |{names}\n| --- | ---: | ---: |{lines}\n{rows}\n"
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
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    nodes = onnx.load(str(graph), load_external_data=False).graph.node
    quantize_dynamic(
        graph,
        path,
        per_channel=True,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=[node.name for node in nodes if node.op_type == "Conv"],  # onnxruntime has no such operation
        use_external_data_format=_is_large(graph, 4),
    )


def _write_openvino(graph: Path, path: Path) -> None:
    import openvino

    path.parent.mkdir()
    openvino.save_model(openvino.convert_model(str(graph)), str(path), compress_to_fp16=False)


_WRITERS = {ONNX_FP16: _write_fp16, ONNX_INT8: _write_int8, OPENVINO: _write_openvino}


def _is_large(graph: Path, factor: int) -> bool:
    """Whether weights of 1 / factor of the size may exceed one file."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*")) / factor >= MAX_GRAPH_BYTES


class GraphSession(ABC):
    """An open graph with its inputs and its outputs by name."""

    def __init__(self, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.path, self.inputs, self._outputs = path, inputs, outputs

    def require_inputs(self, known: Collection[str]) -> None:
        """Raise CheckpointError for an input that is none of these."""
        for name in self.inputs:
            if name not in known:
                raise CheckpointError(f"{self.path} has the input {name!r:.200}; known are {', '.join(known)}")

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


def open_graph(path: Path, directory: Path, inputs: Collection[str] = _INPUTS) -> GraphSession:
    """Open a graph of a model directory with as many threads as torch uses.

    Raises CheckpointError if its library cannot, or it has other inputs than `inputs`, by default those of texts;
    ModelError if it leads out of `directory`.
    """
    for file in (path, path.with_suffix(".bin")) if path.suffix == ".xml" else (path,):
        require_own_file(file, directory)
    try:
        session = _OpenVino(path) if path.suffix == ".xml" else _OnnxRuntime(path)
        session.require_inputs(inputs)
        return session
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
