"""What a kind of model declares about its model directories: files, outputs to reproduce, graphs, words of the card.

N: texts; L: tokens of a padded text; H: hidden size; D: dimensions of a vector; V: words; R: vectors of a text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedTokenizerBase

from embedtrain.checkpoint.tensor_files import TensorSpec
from embedtrain.config.recipe import LOGIT_SCORE, ExportConfig
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError
from embedtrain.formats.transformers import open_checked, open_tokenizer, resolve_max_length, write_tokenizer
from embedtrain.formats.verify import PROBES
from embedtrain.losses.encoded import Part
from embedtrain.models.build import assemble_encoder, head_weights
from embedtrain.models.encoder import POOLING_MODULE, Encoder
from embedtrain.models.heads import module_locations
from embedtrain.models.types import ModelSource

# Outputs of graphs. The first two are those of transformers' classes, which optimum and sentence-transformers read; the
# next two are sentence-transformers' own.
HIDDEN, LOGITS = "last_hidden_state", "logits"
VECTORS, TOKEN_VECTORS = "sentence_embedding", "token_embeddings"
_BACKBONE = "backbone."
POOLING_FOLDER = "1_Pooling"
_MAX_PROMPT = 60  # characters in a table of prompts
_NO_LOGIT_SCORE = (
    f"export.formats: {LOGIT_SCORE} is for rerankers that start from the score of tokens (model.score_head=tokens); "
    "leave it out"
)

# Of each output by its name, what is compared of each of PROBES: [R, D].
ProbeRows = dict[str, list[Tensor]]


# By part of the output (see commands/verify/clients.py) and way of encoding, an array for each text or pair.
ServingOutputs = dict[str, dict[str, list[NDArray[np.float32]]]]


class StoredName(NamedTuple):
    """Where a weight of the encoder is in a model directory."""

    key: str
    file: str | None = None  # None: model.safetensors, or the files that it is split into
    is_float32: bool = False  # whatever the type of the export


class TowerGraph(NamedTuple):
    """The graph of one of several towers, which gives vectors [N, D].

    Attributes:
        name: of its files, without the ending.
        model: takes the inputs in the order of `axes`.
        axes: of each input, the names of the axes whose sizes are not fixed.
        output: the name of the vectors.
        probes: inputs of items one by one, and of all of them as one batch.
    """

    name: str
    model: nn.Module
    axes: Mapping[str, Mapping[int, str]]
    output: str
    probes: Sequence[Mapping[str, Tensor]]


class ModelFiles(ABC):
    """The model directories of one kind of model.

    What is not abstract is right for a backbone that transformers opens, with a head of our own behind it that no other
    library computes, and without graphs.

    Attributes:
        plural: what cards and messages call such models.
        description: what the card calls one, with {dimension} and {max_length}.
        tags: of the model card.
        task: of the model card, one of the Hub's.
        graph: what the outputs of the ONNX graph are.
        agreement: how a smaller graph is compared with it.
        encodes_plain_texts: whether a text may be neither a query nor a document.
        has_pooler: whether the files have the backbone's pooler, which the encoder has not.
    """

    plural: ClassVar[str]
    description: ClassVar[str]
    tags: ClassVar[Sequence[str]] = ("feature-extraction",)
    task: ClassVar[str] = "feature-extraction"
    graph: ClassVar[str] = ""
    agreement: ClassVar[str] = ""
    encodes_plain_texts: ClassVar[bool] = True
    has_pooler: ClassVar[bool] = True

    @abstractmethod
    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """Write the tokenizer and the settings of all libraries into a directory that has config.json."""

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """Lines of the card: how libraries open the model `name` and compute its outputs.

        `architecture` has its settings and tokenizer.
        """
        return python_block("from embedtrain import load_encoder", "", f'encoder = load_encoder("{name}")')

    def verified_texts(self, texts: list[str], tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> list[str]:
        """Those of which `verify` compares what engines compute."""
        return texts

    def probe_documents(self, tokenizer: TextTokenizer) -> AbstractContextManager[list[str]]:
        """Items of pictures that `verify` compares as well, whose files exist in the block."""
        return nullcontext([])

    def is_transformers(self, source: ModelSource) -> bool:
        """Whether transformers opens the directory without another library; else it cannot be a graph either."""
        return True

    def check_export(self, config: ExportConfig, kind: str) -> None:
        """Raise a ConfigError for options of an export that do not fit models of this `kind`."""
        if config.truncate_dim is not None:
            raise ConfigError(
                f"truncate_dim={config.truncate_dim}: is for the vectors of model.kind=dense, not {kind}; leave it out"
            )

    def model_folders(self, directory: Path) -> list[Path]:
        """The folders of a directory with the config.json of a model of transformers."""
        return [directory]

    # Weights

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """Of each weight of the encoder that is stored, its name in the directory."""
        names, stored = list(names), {}
        for name in names:
            if name.startswith(_BACKBONE):
                stored[name] = StoredName(name.removeprefix(_BACKBONE))
        for index, folder in enumerate(sorted(path.name for path in architecture.glob("*_Dense"))):
            prefix = f"dense.{index}."
            file = f"{folder}/model.safetensors"
            stored |= {n: StoredName(n.removeprefix(prefix), file) for n in names if n.startswith(prefix)}
        prefix, file = f"{POOLING_MODULE}.", f"{POOLING_FOLDER}/model.safetensors"
        stored |= {n: StoredName(n.removeprefix(prefix), file) for n in names if n.startswith(prefix)}
        return stored

    def further_specs(self, architecture: Path) -> dict[str, TensorSpec]:
        """Weights that a directory has besides those of the encoder, by names of `stored_names`; none by default."""
        return {}

    def further_rows(self, base: ModelSource) -> Iterator[tuple[str, int, Tensor]]:
        """Their rows, with the number of the first one, from the model that was trained."""
        return iter(())

    def stored_shapes(self, source: ModelSource) -> dict[Path, dict[str, list[int]]]:
        """Of each folder of a directory with weights, their names and shapes by its configuration."""
        assert source.directory is not None
        with init_empty_weights(include_buffers=False):
            backbone = AutoModel.from_config(source.config, trust_remote_code=source.trust_remote_code)
        shapes = {source.directory: {name: list(tensor.shape) for name, tensor in backbone.state_dict().items()}}
        for head in source.vectors.dense:
            assert head.directory is not None
            bias = {"linear.bias": [head.num_out]} if head.bias else {}
            shapes[head.directory] = {"linear.weight": [head.num_out, head.num_in]} | bias
        return shapes

    def is_sentence_transformers(self, source: ModelSource) -> bool:
        """Whether sentence-transformers opens the directory."""
        return True

    def missing_packages(self, source: ModelSource) -> list[str]:
        """Packages that are not installed, and without which sentence-transformers opens no such directory."""
        return []

    def finish_weights(self, directory: Path) -> None:  # noqa: B027 - most have none
        """Write the files that are made of the weights of a directory."""

    # Outputs that a directory has to reproduce

    def probe(
        self, encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str], device: torch.device
    ) -> Tensor:
        """The outputs of an encoder for PROBES as rows of one size, one text per forward pass.

        By default one row of all numbers, so that differences are relative to all of them. A collective if the encoder
        is sharded.
        """
        tokens = tokenizer.tokens(PROBES)
        with torch.no_grad():
            outputs = [encoder(tokenizer.chunk(tokens, [row]).to(device)) for row in range(len(tokens))]
        return torch.cat([part.flatten().cpu() for parts in outputs for part in parts])[None]

    def compared(self, tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> Tensor | None:
        """Which columns of `probe` other libraries compute as we do, bool: None for all."""
        return None

    def add_heads(self, backbone: nn.Module, source: ModelSource) -> Encoder:
        """The encoder of a backbone with the head of a directory."""
        head = source.kind.head(source)
        assert head is not None
        encoder = Encoder(backbone, head)
        weights = {name: weight for name, weight in head_weights(source).items() if not name.startswith("backbone.")}
        for name, location in module_locations(source).items():
            with safe_open(location.path, framework="pt") as file:
                weights[name] = file.get_tensor(location.key)
        state = encoder.state_dict()  # buffers as well as parameters
        for name, weight in weights.items():
            state[name].copy_(weight)
        return encoder.eval()

    def open_encoder(self, directory: Path, source: ModelSource) -> Encoder:
        """The fp32 backbone that transformers loads from a directory, with our pooling and heads."""
        return self.add_heads(open_checked(AutoModel, directory, source), source)

    def probe_opened(self, encoder: Encoder, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """`probe` of an encoder whose backbone and tokenizer transformers has opened."""
        layout = source.kind.layout(source, tokenizer)
        own = TextTokenizer(tokenizer, resolve_max_length(source, tokenizer), layout)
        return self.probe(encoder.eval(), own, source.prompts, torch.device("cpu"))

    def of_transformers(self, directory: Path, source: ModelSource) -> Tensor:
        """`probe` by transformers, and what it does not compute by us."""
        encoder = self.open_encoder(directory, source)
        return self.probe_opened(encoder, source, open_tokenizer(directory, source))

    def of_sentence_transformers(
        self, directory: Path, source: ModelSource, prompts: Mapping[str, str], max_length: int
    ) -> Tensor | None:
        """`probe` by sentence-transformers, with as many columns as `num_computed` says; None if it has no such models.

        Raises CheckpointError if it cannot open the directory, or with other settings, prompts or lengths.
        """
        return None

    def num_computed(self, source: ModelSource) -> int | None:
        """How many columns of `probe`, the first ones, sentence-transformers computes; None: all."""
        return source.vectors.truncate_dim

    def of_peft(
        self,
        base: ModelSource,
        weights: Mapping[str, Tensor],
        attach: Callable[[nn.Module], nn.Module],
        source: ModelSource,
    ) -> Tensor:
        """`probe` of a base model with these weights to which `attach` adds adapters; `source` has the tokenizer."""
        encoder = assemble_encoder(base)
        encoder.load_state_dict(dict(weights))
        encoder.backbone = attach(encoder.backbone)
        assert source.directory is not None
        return self.probe_opened(encoder, source, open_tokenizer(source.directory, source))

    def require_check(self, source: ModelSource) -> None:  # noqa: B027 - most need none
        """Raise a ConfigError if an installed library is too old to compute the outputs of an export of `source`."""

    def require_logit_score(self, base: ModelSource, architecture: Path) -> None:
        """Raise a ConfigError if the format `logit_score` is not for this model; `base` is the one that was trained."""
        raise ConfigError(_NO_LOGIT_SCORE)

    def write_logit_score(self, directory: Path, base: ModelSource, max_file_size: str) -> Path:
        """Write a folder in this format into an exported directory; returns its path."""
        raise ConfigError(_NO_LOGIT_SCORE)

    # Graphs

    def no_graph(self, source: ModelSource) -> str:
        """Why a model without `graph_outputs` and `tower_graphs` has no graph, for a message."""
        return f"model.kind={source.kind.name} has no ONNX graph"

    def graph_names(self, source: ModelSource) -> Sequence[str]:
        """The names of `tower_graphs`; none of a model with one graph. A ConfigError if a tower has no graph."""
        return ()

    def tower_graphs(self, directory: Path, source: ModelSource) -> Sequence[TowerGraph]:
        """The graphs of a directory of a model with several towers, in fp32."""
        return ()

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """The outputs of a graph, with the name of the second axis of those where its size depends on the texts.

        The first is that of transformers' class, for clients that pool themselves. Without any there is no graph.
        """
        return {}

    def own_outputs(self, source: ModelSource) -> list[str]:
        """The outputs by which a smaller graph is compared: the model's own, with everything applied."""
        return list(self.graph_outputs(source))[-1:]

    def open_traced(self, directory: Path, source: ModelSource) -> tuple[Encoder | None, nn.Module]:
        """The fp32 encoder of a directory, if it is needed, and the model of transformers, which is called."""
        encoder = self.open_encoder(directory, source)
        return encoder, encoder.backbone

    def traced(self, source: ModelSource, encoder: Encoder | None, output: Any, mask: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the graph, from that of the model of transformers and the mask [N, L]."""
        assert encoder is not None
        hidden = output.last_hidden_state
        return hidden, *encoder.output.graph_outputs(hidden, mask)

    def graph_shapes(self, source: ModelSource, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """The outputs of a graph that `from_graph` reads, with their shapes for padded texts of `length` tokens.

        Without any, commands cannot compute with the graph (`backend=onnx`).
        """
        return {}

    def open_rest(self, source: ModelSource) -> nn.Module | None:
        """What of the encoder is not in the graph."""
        return None

    def from_graph(
        self,
        source: ModelSource,
        rest: nn.Module | None,
        outputs: Sequence[Tensor],
        chunk: Chunk,
    ) -> Tensor:
        """What the encoder returns of a chunk, from the outputs in `graph_shapes`: by default the only one."""
        (output,) = outputs
        return output

    def serving_facts(self, source: ModelSource, *, has_graph: bool) -> Mapping[str, Any]:
        """Traits and other facts that `serving_engines.yaml` refers to, of this kind of model only."""
        return {}

    def serving_outputs(self, part: Part, source: ModelSource, way: str) -> ServingOutputs:
        """What serving engines compute of texts that are encoded in a way, from the encoder's rows of them."""
        return {"vectors": {way: list(part.values[:, : source.vectors.truncate_dim].cpu().numpy())}}

    def probe_texts(self, source: ModelSource) -> list[tuple[str, ...]]:
        """PROBES as the tokenizer gets them for a graph: a text, or the two texts of a pair."""
        return [(text,) for text in PROBES]

    def batched_probes(self) -> range:
        """Those of PROBES that are run as one batch."""
        return range(len(PROBES))

    def reduce(self, source: ModelSource, name: str, output: Tensor, mask: Tensor) -> list[Tensor]:
        """What a client makes of an output of N texts with the mask [N, L], without padding: of each text [R, D]."""
        if name == HIDDEN:
            with torch.no_grad():
                output = self.add_heads(nn.Identity(), source).output.graph_outputs(output, mask)[0]
        return list(output.split(1))

    def joined(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """The rows of texts that `reduce` returns as one matrix of vectors to compare."""
        return torch.cat(list(rows))

    def measure_agreement(self, outputs: ProbeRows, expected: ProbeRows, source: ModelSource) -> float:
        """How close the outputs of a graph are to those of another one, see `agreement`; NaN if one is."""
        cosines = [
            _mean_cosine(rows.float(), references.float())
            for name in self.own_outputs(source)
            for rows, references in zip(outputs[name], expected[name], strict=True)
        ]
        return float(torch.tensor(cosines).min())

    def graph_usage(self) -> list[str]:
        """The paragraph of the card about the graph."""
        return [
            f"`onnx/model.onnx` is the same model in fp32, {self.graph}, for onnxruntime, or for "
            'sentence-transformers and optimum with `backend="onnx"`. If the folder `openvino` exists, it is that of '
            '`backend="openvino"`.',
            "",
        ]


def _mean_cosine(rows: Tensor, references: Tensor) -> float:
    if rows.equal(references):  # a text without words has no cosine
        return 1.0
    return float(F.cosine_similarity(rows, references, dim=1).mean())


def rows_by_text(part: Part) -> list[NDArray[np.float32]]:
    """The rows of each text."""
    assert part.sizes is not None
    return np.split(part.values.cpu().numpy(), np.cumsum(part.sizes)[:-1])


def write_own_tokenizer(directory: Path, tokenizer: TextTokenizer) -> None:
    """Write the tokenizer as it was read."""
    write_tokenizer(directory, tokenizer.tokenizer, tokenizer.max_length)


def python_block(*lines: str) -> list[str]:
    """A block of code of a card, and the empty line after it."""
    return ["```python", *lines, "```", ""]


def shown_prompt(prompt: str) -> str:
    """A prompt in a card, which may be too long for a table."""
    shown = prompt if len(prompt) <= _MAX_PROMPT else f"{prompt[:_MAX_PROMPT]}..."
    return "`` " + repr(shown).replace("|", "\\|") + " ``"


def comparison_block(class_name: str, name: str, documents: str, *more: str, first: str | None = None) -> list[str]:
    """How a class of sentence-transformers compares a question with these documents; `first` is a line before."""
    return python_block(
        *([] if first is None else [first]),
        f"from sentence_transformers import {class_name}",
        "",
        f'model = {class_name}("{name}")',
        'queries = model.encode_query(["a question"])',
        f"documents = model.encode_document({documents})",
        "print(model.similarity(queries, documents))",
        *more,
    )
