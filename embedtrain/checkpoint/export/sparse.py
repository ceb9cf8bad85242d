"""The directory of a learned sparse model, as sentence-transformers and transformers read it, and its verification."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.checkpoint.export.cross_encoder import (
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    open_checked,
    write_modules,
)
from embedtrain.config.sparse import SparseActivation, SparsePooling
from embedtrain.errors import CheckpointError
from embedtrain.files import write_json
from embedtrain.models.cross_encoder import classifier_name
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import SPARSE
from embedtrain.models.source import ModelSource
from embedtrain.models.sparse_encoder import is_masked, language_model, language_model_class

SPLADE_FOLDER = "1_SpladePooling"
_POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"


def write_sparse_settings(directory: Path, source: ModelSource, max_length: int) -> None:
    """Write the files that sentence-transformers reads beside config.json, which names the language model."""
    assert source.words is not None
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", config | {"architectures": [language_model(source.config).__name__]})
    write_modules(directory, {"": TRANSFORMER_MODULE, SPLADE_FOLDER: _POOLING})
    write_json(
        directory / SPLADE_FOLDER / "config.json",
        {
            "pooling_strategy": source.words.pooling.value,
            "activation_function": source.words.activation.value,
            "embedding_dimension": source.dimension,
        },
    )
    write_json(
        directory / TRANSFORMER_SETTINGS,
        {
            "transformer_task": "fill-mask" if is_masked(source.config) else "text-generation",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "token_embeddings",
            "max_seq_length": max_length,
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


def stored_word_name(config: PretrainedConfig) -> Callable[[str], str]:
    """The name in the exported files of a weight of the encoder."""
    prefix = language_model(config).base_model_prefix
    return lambda name: classifier_name(name, prefix)


def word_weights_of_transformers(
    directory: Path, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]
) -> Tensor:
    """Weights of words by the logits of transformers' class, [N, V], one text per forward pass."""
    assert source.words is not None
    model = open_checked(language_model_class(source.config), directory, source).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            weights = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0].relu().log1p()
            if source.words.activation is SparseActivation.log1p_relu:
                weights = weights.log1p()
            rows.append(weights.amax(dim=0) if source.words.pooling is SparsePooling.max else weights.sum(dim=0))
    return torch.stack(rows)


def word_weights_of_sentence_transformers(directory: Path, source: ModelSource, texts: tuple[str, ...]) -> Tensor:
    """Weights of words by sentence-transformers, [N, V]; a CheckpointError if it cannot open the directory."""
    from sentence_transformers import SparseEncoder

    try:
        model = SparseEncoder(
            str(directory),
            device="cpu",
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            model_kwargs={"dtype": "float32"},
        )
        weights = model.encode(
            list(texts), prompt="", convert_to_tensor=True, convert_to_sparse_tensor=False, show_progress_bar=False
        )
        prompts = dict(model.prompts)
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot open {directory}: {type(error).__name__}: {error}"
        ) from error
    for name, text in source.prompts.items():
        if prompts.get(name) != text:
            raise CheckpointError(
                f"sentence-transformers opens {directory} with the prompt {name}={prompts.get(name)!r}, not {text!r}"
            )
    return torch.as_tensor(weights).float().cpu()
