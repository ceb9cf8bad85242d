"""The directory of a learned sparse model, as sentence-transformers and transformers read it, and its verification."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.config.sparse import SparsePooling
from embedtrain.data.static_queries import StaticQueryTokenizer
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import CheckpointError
from embedtrain.formats.cross_encoder import (
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    open_checked,
    write_modules,
)
from embedtrain.formats.portable_files import write_tokenizer
from embedtrain.formats.sentence_transformers import BATCH_SIZE, load_model, opening
from embedtrain.models.cross_encoder import classifier_name
from embedtrain.models.directory_modules import ROUTER_CONFIG
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import SPARSE
from embedtrain.models.sparse_encoder import is_masked, language_model, language_model_class
from embedtrain.models.sparse_head import activate
from embedtrain.models.static_queries import IDF_FILE, QUERY_FOLDER, QUERY_WEIGHTS, STORED_WEIGHT, WEIGHTS, write_idf
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

SPLADE_FOLDER, _ROUTED_SPLADE_FOLDER = "1_SpladePooling", "document_1_SpladePooling"
_POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
_ROUTER = "sentence_transformers.base.modules.router.Router"
_STATIC_EMBEDDING = "sentence_transformers.sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding"


def write_sparse_settings(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """Write the files that sentence-transformers reads beside config.json, which names the language model.

    With static queries the transformer stays at the root, as in OpenSearch's directories: transformers opens it there.
    """
    assert source.kind.name == "sparse"
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
        # By default, sentence-transformers computes the logits of the last token only.
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


def usage_of_words(name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
    """Lines of a model card; `name` is that of the model's directory or repository."""
    is_static = (architecture / QUERY_FOLDER).is_dir()
    static = [
        "Only documents are encoded. The weights of a query's words are those of its tokens "
        f"(`{QUERY_FOLDER}`, and `{IDF_FILE}` for OpenSearch), without inference.",
        "",
    ]
    return [
        *static * is_static,
        "```python",
        "from sentence_transformers import SparseEncoder",
        "",
        f'model = SparseEncoder("{name}")',
        'queries = model.encode_query(["a question"])',
        'documents = model.encode_document(["a text that answers it", "another text"])',
        "print(model.similarity(queries, documents))",
        "print(model.decode(documents, top_k=10))",
        "```",
        "",
    ]


def has_word_weights(architecture: Path) -> bool:
    """Whether a directory is that of a learned sparse model."""
    return any((architecture / name).is_dir() for name in (SPLADE_FOLDER, _ROUTED_SPLADE_FOLDER))


def query_weight_locations(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The file and the name there of the weights of static queries, if they are among these of the encoder."""
    return {name: (f"{QUERY_FOLDER}/{WEIGHTS}", STORED_WEIGHT) for name in names if name == QUERY_WEIGHTS}


def write_query_weights(directory: Path, source: ModelSource) -> None:
    """Write the weights of static queries for OpenSearch, if the model has these."""
    if source.kind.name == "sparse" and source.settings.queries is not None:
        write_idf(directory, read_tokenizer(directory, trust_remote_code=False))


def probe_words(
    encoder: Encoder, tokenizer: StaticQueryTokenizer, texts: tuple[str, ...], device: torch.device
) -> Tensor:
    """Weights of words in the texts as documents and, below them, as queries: [2 N, V].

    One text per forward pass; a collective if the encoder is sharded.
    """
    rows = []
    for role in (TextRole.document, TextRole.query):
        ids = tokenizer.ids(texts, role=role)
        with torch.no_grad():
            rows += [encoder(tokenizer.chunk(ids, [row]).to(device)).cpu() for row in range(len(ids))]
    return torch.cat(rows)


def _looked_up(directory: Path, source: ModelSource, texts: tuple[str, ...]) -> list[Tensor]:
    """Weights of words in queries, [V] each, from the files alone."""
    assert source.kind.name == "sparse"
    if source.settings.queries is None:
        return []
    weights = load_file(directory / QUERY_FOLDER / WEIGHTS)[STORED_WEIGHT].float()
    tokenizer, rows = AutoTokenizer.from_pretrained(directory / QUERY_FOLDER), []
    for text in texts:
        words = sorted(set(tokenizer(text, truncation=True, add_special_tokens=False)["input_ids"]))
        rows.append(torch.zeros_like(weights))
        rows[-1][words] = weights[words]
    return rows


def stored_word_name(config: PretrainedConfig) -> Callable[[str], str]:
    """The name in the exported files of a weight of the encoder."""
    prefix = language_model(config).base_model_prefix
    return lambda name: classifier_name(name, prefix)


def word_weights_of_transformers(
    directory: Path, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]
) -> Tensor:
    """Weights of words by the logits of transformers' class, [N, V], one text per forward pass."""
    assert source.kind.name == "sparse"
    model = open_checked(language_model_class(source.config), directory, source).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
            weights = activate(logits, source.settings.activation)
            rows.append(weights.amax(dim=0) if source.settings.pooling is SparsePooling.max else weights.sum(dim=0))
    return torch.stack([*rows, *_looked_up(directory, source, texts)])


def word_weights_of_sentence_transformers(directory: Path, source: ModelSource, texts: tuple[str, ...]) -> Tensor:
    """Weights of words by sentence-transformers, [N, V]; a CheckpointError if it cannot open the directory."""
    assert source.kind.name == "sparse"
    with opening(directory):
        model = load_model("SparseEncoder", directory, source)
        tasks = ["document"] if source.settings.queries is None else ["document", "query"]
        weights = torch.cat(
            [
                model.encode(
                    list(texts),
                    prompt="",
                    task=task,
                    batch_size=BATCH_SIZE,
                    convert_to_tensor=True,
                    convert_to_sparse_tensor=False,
                    show_progress_bar=False,
                )
                for task in tasks
            ]
        )
        prompts = dict(model.prompts)
    for name, text in source.prompts.items():
        if prompts.get(name) != text:
            raise CheckpointError(
                f"sentence-transformers opens {directory} with the prompt {name}={prompts.get(name)!r}, not {text!r}"
            )
    return torch.as_tensor(weights).float().cpu()
