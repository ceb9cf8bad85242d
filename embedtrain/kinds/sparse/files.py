"""Model directories of learned sparse models: a language model of transformers, read as SparseEncoder.

Static queries are a Router of sentence-transformers, and `idf.json` for OpenSearch.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from embedtrain.config.kind_settings import SparseActivation, SparsePooling, WordWeights
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, TextRole
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.model_files import (
    LOGITS,
    VECTORS,
    ModelFiles,
    ServingOutputs,
    StoredName,
    comparison_block,
    write_own_tokenizer,
)
from embedtrain.formats.sentence_transformers import (
    BATCH_SIZE,
    QUERY_FOLDER,
    ROUTER_CONFIG,
    SPARSE,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    WEIGHTS,
    load_model,
    opening,
    write_modules,
)
from embedtrain.formats.transformers import open_checked, open_tokenizer, read_tokenizer, write_tokenizer
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.sparse.model import IDF_FILE, read_query_weights, write_idf
from embedtrain.losses.encoded import Part
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json
from embedtrain.models.own_class import is_masked, language_model, language_model_class, own_name
from embedtrain.models.sparse_head import QUERY_WEIGHTS, STORED_WEIGHT, QueryWeights, activate
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

SPLADE_FOLDER, _ROUTED_SPLADE_FOLDER = "1_SpladePooling", "document_1_SpladePooling"
_POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
_ROUTER = "sentence_transformers.base.modules.router.Router"
# The first version that reads how many tokens of a text a causal language model computes the logits of.
_READS_LOGITS_TO_KEEP = "6.2"
_STATIC_EMBEDDING = "sentence_transformers.sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding"


class SparseFiles(ModelFiles):
    """The language model, SpladePooling, and weights of queries that are not encoded."""

    plural = "sparse models"
    description = (
        "A learned sparse model (SPLADE): weights of the {dimension} words of a vocabulary, most of them 0, for texts "
        "of up to {max_length} tokens"
    )
    tags = ("sparse-encoder", "splade", "sparse", "feature-extraction")
    graph = "from token ids to `logits` and `sentence_embedding`, the weights of words"
    agreement = "smallest cosine of the weights of words"
    has_pooler = False

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """The files that sentence-transformers reads beside config.json, which names the language model."""
        write_own_tokenizer(directory, tokenizer)
        _write_settings(directory, source, tokenizer)

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """sentence-transformers; static queries are explained."""
        note = [
            "Only documents are encoded. The weights of a query's words are those of its tokens "
            f"(`{QUERY_FOLDER}`, and `{IDF_FILE}` for OpenSearch), without inference.",
            "",
        ]
        documents, decoded = '["a text that answers it", "another text"]', "print(model.decode(documents, top_k=10))"
        is_static = (architecture / QUERY_FOLDER).is_dir()
        return [*note * is_static, *comparison_block("SparseEncoder", name, documents, decoded)]

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """Those of the language model's class; weights of queries have a file of their own, in float32."""
        config = AutoConfig.from_pretrained(architecture, local_files_only=True)
        prefix = language_model(config).base_model_prefix
        queries = StoredName(STORED_WEIGHT, f"{QUERY_FOLDER}/{WEIGHTS}", is_float32=True)
        return {name: queries if name == QUERY_WEIGHTS else StoredName(own_name(name, prefix)) for name in names}

    def stored_shapes(self, source: ModelSource) -> dict[Path, dict[str, list[int]]]:
        """Those of the language model, and of the weights of queries."""
        assert source.directory is not None
        encoder, stored = build_encoder(source), {}
        shapes = {name: list(tensor.shape) for name, tensor in encoder.state_dict().items()}
        if (queries := shapes.pop(QUERY_WEIGHTS, None)) is not None:
            stored[source.directory / QUERY_FOLDER] = {STORED_WEIGHT: queries}
        return stored | {source.directory: {encoder.stored_name(name): shape for name, shape in shapes.items()}}

    def finish_weights(self, directory: Path) -> None:
        """The weights of static queries for OpenSearch."""
        if (directory / QUERY_FOLDER).is_dir():
            write_idf(directory, read_tokenizer(directory, trust_remote_code=False))

    def probe(
        self,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        prompts: Mapping[str, str],
        device: torch.device,
    ) -> Tensor:
        """Weights of words in the texts as documents and, if they are looked up, below them as queries: [N, V]."""
        rows = []
        for role in (TextRole.document, TextRole.query) if tokenizer.layout.roles_differ else (TextRole.document,):
            tokens = tokenizer.tokens(PROBES, role=role)
            with torch.no_grad():
                rows += [encoder(tokenizer.chunk(tokens, [row]).to(device))[0].cpu() for row in range(len(tokens))]
        return torch.cat(rows)

    def of_transformers(self, directory: Path, source: ModelSource) -> Tensor:
        """Weights of words by the logits of transformers' class; those of looked-up queries from the files alone."""
        tokenizer = open_tokenizer(directory, source)
        model, rows = open_checked(language_model_class(source.config), directory, source).eval(), []
        with torch.no_grad():
            for text in PROBES:
                logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
                weights = activate(logits, source.settings.activation)
                rows.append(weights.amax(dim=0) if source.settings.pooling is SparsePooling.max else weights.sum(dim=0))
        return torch.stack([*rows, *_looked_up(directory, source)])

    def require_check(self, source: ModelSource) -> None:
        """Decoders need a version of sentence-transformers that computes the logits of all tokens."""
        installed = version("sentence-transformers")
        if not is_masked(source.config) and Version(installed) < Version(_READS_LOGITS_TO_KEEP):
            raise ConfigError(
                f"sentence-transformers {installed} computes the weights of words of a causal language model from the "
                f"last token alone, so that an export cannot be checked: install {_READS_LOGITS_TO_KEEP} or newer, or "
                "write export.check=false (check=false for the command export)"
            )

    def of_sentence_transformers(
        self,
        directory: Path,
        source: ModelSource,
        prompts: Mapping[str, str],
        max_length: int,
    ) -> Tensor:
        """Weights of words of SparseEncoder; prompts are compared."""
        self.require_check(source)
        options = {"prompt": "", "batch_size": BATCH_SIZE, "show_progress_bar": False}
        options |= {"convert_to_tensor": True, "convert_to_sparse_tensor": False}
        with opening(directory):
            model = load_model("SparseEncoder", directory, source)
            tasks = ["document"] if source.settings.queries is None else ["document", "query"]
            weights = torch.cat([model.encode(list(PROBES), task=task, **options) for task in tasks])
            stored = dict(model.prompts)
        for name, text in source.prompts.items():
            if stored.get(name) != text:
                raise CheckpointError(
                    f"sentence-transformers opens {directory} with the prompt {name}={stored.get(name)!r}, not {text!r}"
                )
        return torch.as_tensor(weights).float().cpu()

    def serving_facts(self, source: ModelSource, *, has_graph: bool) -> dict[str, bool]:
        """What is not as in SPLADE."""
        words = source.settings
        is_usual = (words.pooling, words.activation) == (SparsePooling.max, SparseActivation.relu)
        return {"has_static_queries": words.queries is not None, "has_other_words": not is_usual}

    def serving_outputs(self, part: Part, source: ModelSource, way: str) -> ServingOutputs:
        """Weights of words."""
        return {"word_weights": {way: list(part.values.cpu().numpy())}}

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """Weights of words."""
        return {LOGITS: "length", VECTORS: None}

    def open_traced(self, directory: Path, source: ModelSource) -> tuple[Encoder | None, nn.Module]:
        """The language model."""
        return None, open_checked(language_model_class(source.config), directory, source).eval()

    def traced(self, source: ModelSource, encoder: Encoder | None, output: Any, mask: Tensor) -> tuple[Tensor, ...]:
        """Weights of words of a text."""
        return output.logits, pooled_words(output.logits, mask, source.settings)

    def graph_shapes(self, source: ModelSource, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """Weights of words."""
        return {VECTORS: (texts, source.dimension)}

    def open_rest(self, source: ModelSource) -> nn.Module | None:
        """The weights of words in queries that are not encoded."""
        if source.settings is None or source.settings.queries is None:
            return None
        rest = QueryWeights(source.dimension, trained=False)
        rest.weight.data.copy_(read_query_weights(source.settings.queries, source.directory, source.dimension))
        return rest

    def from_graph(
        self,
        source: ModelSource,
        rest: nn.Module | None,
        outputs: Sequence[Tensor],
        chunk: Chunk,
    ) -> Tensor:
        """Weights of words in documents, and in queries that are not encoded: [N, V]."""
        if rest is None or chunk.query_words is None:
            return outputs[0]
        looked_up, _ = rest(chunk.query_words)
        return torch.cat([outputs[0], looked_up]).index_select(0, chunk.query_words.order)

    def batched_probes(self) -> range:
        """All but the longest: the graph has logits of all words for each token, and for padding as well."""
        return range(len(PROBES) - 1)

    def reduce(self, source: ModelSource, name: str, output: Tensor, mask: Tensor) -> list[Tensor]:
        """Weights of words of a text."""
        return list((pooled_words(output, mask, source.settings) if name == LOGITS else output).split(1))


def _write_settings(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """With static queries the transformer stays at the root, as in OpenSearch's directories, for transformers."""
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", config | {"architectures": [language_model(source.config).__name__]})
    queries, pooling = source.settings.queries, SPLADE_FOLDER
    if queries is None:
        write_modules(directory, {"": TRANSFORMER_MODULE, pooling: _POOLING})
    else:
        pooling = _ROUTED_SPLADE_FOLDER
        write_modules(directory, {"": _ROUTER})
        types = {QUERY_FOLDER: _STATIC_EMBEDDING, "": TRANSFORMER_MODULE, pooling: _POOLING}
        parameters = {"default_route": "document", "allow_empty_key": True, "route_mappings": {}}
        structure = {"query": [QUERY_FOLDER], "document": ["", pooling]}
        write_json(directory / ROUTER_CONFIG, {"types": types, "structure": structure, "parameters": parameters})
        write_json(directory / QUERY_FOLDER / "config.json", {"frozen": not queries.trained})
        write_tokenizer(directory / QUERY_FOLDER, tokenizer.tokenizer, tokenizer.max_length)
    write_json(
        directory / pooling / "config.json",
        {
            "pooling_strategy": source.settings.pooling.value,
            "activation_function": source.settings.activation.value,
            "embedding_dimension": source.dimension,
        },
    )
    write_json(
        directory / TRANSFORMER_SETTINGS,
        {
            "transformer_task": "fill-mask" if is_masked(source.config) else "text-generation",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "token_embeddings",
            "max_seq_length": tokenizer.max_length,
        }
        # By default, sentence-transformers computes the logits of the last token only; before 6.2 always.
        | ({} if is_masked(source.config) else {"processing_kwargs": {"text": {"logits_to_keep": 0}}}),
    )
    write_json(
        directory / "config_sentence_transformers.json",
        {
            "__version__": {},
            "model_type": SPARSE,
            "prompts": {"query": "", "document": ""} | source.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "dot",
        },
    )


def pooled_words(logits: Tensor, mask: Tensor, words: WordWeights) -> Tensor:
    """Weights of words [N, V] from the logits of all tokens [N, L, V]; a weight is at least 0."""
    weights = logits.relu().log1p()
    if words.activation is SparseActivation.log1p_relu:
        weights = weights.log1p()
    weights = weights * mask.unsqueeze(-1)
    return weights.amax(dim=1) if words.pooling is SparsePooling.max else weights.sum(dim=1)


def _looked_up(directory: Path, source: ModelSource) -> list[Tensor]:
    """Weights of words in queries, [V] each, from the files alone."""
    if source.settings.queries is None:
        return []
    weights = load_file(directory / QUERY_FOLDER / WEIGHTS)[STORED_WEIGHT].float()
    tokenizer, rows = AutoTokenizer.from_pretrained(directory / QUERY_FOLDER), []
    for text in PROBES:
        words = sorted(set(tokenizer(text, truncation=True, add_special_tokens=False)["input_ids"]))
        rows.append(torch.zeros_like(weights))
        rows[-1][words] = weights[words]
    return rows
