"""Encoding with the graphs of an export, compared with the weights, and with sentence-transformers.

Its backend "onnx" needs optimum-onnx, which cannot be installed beside the transformers that embedtrain needs.
"""

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from benchmarks.encoding import CHUNK_TOKENS, Ours, Theirs
from benchmarks.inputs import MINILM, precisions, retrieval_set
from benchmarks.measure import Timed, interleave, markdown, ratio, require, speed, unit
from embedtrain.config.evaluation import Backend
from embedtrain.config.recipe import ONNX, OPENVINO, Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.evaluation.types import RetrievalSet
from embedtrain.formats.onnx import FILES, write_graph, write_variants
from embedtrain.formats.source import open_model_source
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.graph import load_graph
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.models.types import ModelSource

DOCUMENTS = 200
TITLE = f"Encoding {DOCUMENTS} documents with ONNX graphs, all-MiniLM-L6-v2"
MIN_COSINE = 0.95  # of any vector with the one in fp32


class Graph:
    """Encodes the documents with a graph of an export."""

    def __init__(self, world: World, source: ModelSource, backend: Backend, texts: list[str]) -> None:
        self.encoder = SentenceEncoder.from_model(load_graph(source, backend, world), world, chunk_tokens=CHUNK_TOKENS)
        self.texts = texts

    def __call__(self, _round_number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        return self.encoder.encode_all(self.texts)


def measure(num_documents: int = DOCUMENTS) -> str:
    formats = [*FILES] if find_spec(OPENVINO) is not None else [name for name in FILES if name != OPENVINO]
    with tempfile.TemporaryDirectory() as folder, joined_world() as world:
        directory = Path(shutil.copytree(MINILM, Path(folder) / "model"))
        source = open_model_source(DenseOptions(path=str(directory)))
        write_graph(directory, source)
        write_variants(directory, source, formats, min_agreement=0.0)
        data = retrieval_set(min(100, num_documents), num_documents).data
        assert isinstance(data, RetrievalSet)
        texts = list(data.documents.texts)
        encoders = {f"weights, {precision.value}": Ours(world, precision, texts) for precision in precisions()}
        tokens = encoders["weights, fp32"].tokens
        calls = dict[str, Ours | Graph | Theirs](encoders)
        calls |= {f"graph, {name}": Graph(world, source, Backend(name), texts) for name in (ONNX, *formats)}
        calls["sentence-transformers, torch"] = Theirs(world, Precision.fp32, texts)
        timed = dict(zip(calls, interleave(*calls.values()), strict=True))
    return _table(timed, tokens, num_documents)


def _table(timed: dict[str, list[Timed[Tensor]]], tokens: int, num_documents: int) -> str:
    reference, rows = timed["weights, fp32"], []
    for name, rounds in timed.items():
        cosine = min(float(F.cosine_similarity(a.value, b.value).min()) for a, b in zip(rounds, reference, strict=True))
        require(cosine >= MIN_COSINE, f"graphs: a vector of {name} has the cosine {cosine} with that of fp32")
        counts = [num_documents] * len(rounds)
        speeds = [f"{speed(rounds, counts):,.0f}", f"{speed(rounds, [tokens] * len(rounds)):,.0f}"]
        rows.append([name, *speeds, ratio(rounds, reference), f"{cosine:.6f}"])
    header = ["computed by", f"texts / {unit()}", f"real tokens / {unit()}", "speed relative to weights, fp32"]
    return markdown([*header, "min cosine with weights, fp32"], rows)
