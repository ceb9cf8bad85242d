"""The causal language model of a reranker that started from tokens, as `LogitScore` of sentence-transformers reads it.

Its vocabulary head is that of the model that was trained, with one row replaced: with two tokens, the row of the first
is that of the second plus the trained `score.weight`, so that their difference is the score; with one token it is the
trained weight. The head has rows of its own even where those of the model are its embeddings, which stay as trained.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from embedtrain.checkpoint.tensor_files import DTYPES_BY_NAME, RowWriter, TensorSpec, file_layout
from embedtrain.config.recipe import LOGIT_SCORE as FORMAT
from embedtrain.errors import ConfigError
from embedtrain.formats.cross_encoder import (
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    renders_pairs,
    write_modules,
)
from embedtrain.formats.portable_files import write_tokenizer
from embedtrain.models.build import vocabulary_head
from embedtrain.models.stored_weights import TensorLocation, stored_tensors
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

FOLDER = "logit_score"
_MODULE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
_MODULE_FOLDER = "1_LogitScore"
_SCORE, _HEAD = "score.weight", "lm_head.weight"
_WEIGHTS = "model{suffix}.safetensors"
_OF_CLASSIFIERS = ("id2label", "label2id", "num_labels", "problem_type", "sentence_transformers")


@dataclass(frozen=True, slots=True)
class LogitScoreExport:
    """What the format needs besides the exported directory."""

    base: ModelSource  # the model that was trained, which has the vocabulary head
    max_file_size: str  # as `export.max_file_size`


def require_logit_score(base: ModelSource, architecture: Path) -> None:
    """Raise a ConfigError if a model cannot be exported in this format; `architecture` is that of the run."""
    if base.kind.name != "cross_encoder" or not base.settings.tokens:
        raise ConfigError(
            f"export.formats: {FORMAT} is for rerankers that start from the score of tokens (model.score_head=tokens); "
            "leave it out"
        )
    if not renders_pairs(architecture):
        raise ConfigError(
            f"export.formats: {FORMAT} needs a chat template, and as one text the parts of the template have other "
            "tokens; leave it out"
        )


def write_logit_score(directory: Path, export: LogitScoreExport) -> Path:
    """Write the folder into an exported directory, one tensor in memory at a time; returns its path.

    Raises ModelError if the base model's files have changed and have no vocabulary head.
    """
    folder = directory / FOLDER
    folder.mkdir()
    stored = stored_tensors(directory)
    specs = {name: _spec(location) for name, location in stored.items() if name != _SCORE}
    head = _trained_head(export.base, stored)
    specs[_HEAD] = TensorSpec.of(head)
    split = split_state_dict_into_shards_factory(
        specs,
        get_storage_size=lambda spec: spec.num_bytes,
        max_shard_size=export.max_file_size,
        filename_pattern=_WEIGHTS,
    )
    for file, names in split.filename_to_tensors.items():
        layout = file_layout({name: specs[name] for name in names})
        with RowWriter(folder / file, layout, writes_header=True) as writer:
            for name in names:
                writer.write(name, head if name == _HEAD else _read(stored[name]))
    if split.is_sharded:
        weights = {name: file for file, names in split.filename_to_tensors.items() for name in names}
        index = {"metadata": split.metadata, "weight_map": dict(sorted(weights.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    _write_settings(directory, folder, export.base)
    return folder


def _trained_head(base: ModelSource, stored: Mapping[str, TensorLocation]) -> Tensor:
    """The vocabulary head [V, H] with the trained score, in the type of the export."""
    assert base.kind.name == "cross_encoder"
    score = _read(stored[_SCORE])
    head = vocabulary_head(base).to(score.dtype)
    first, *second = base.settings.tokens
    # Added to the row as it is stored, so that one rounding is left.
    row = score[0].float() + sum(head[token].float() for token in second)
    head[first] = row.to(score.dtype)
    return head


def _write_settings(directory: Path, folder: Path, base: ModelSource) -> None:
    tokens: tuple[int, ...] = () if base.kind.name != "cross_encoder" else base.settings.tokens
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(base.config)].__name__
    config = {key: value for key, value in config.items() if key not in _OF_CLASSIFIERS}
    write_json(folder / "config.json", config | {"architectures": [name], "tie_word_embeddings": False})
    assert base.directory is not None
    exported = read_tokenizer(directory, trust_remote_code=base.trust_remote_code)
    tokenizer = read_tokenizer(base.directory, trust_remote_code=base.trust_remote_code)
    tokenizer.chat_template = exported.chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = exported.pad_token
    write_tokenizer(folder, tokenizer, exported.model_max_length)
    write_modules(folder, {"": TRANSFORMER_MODULE, _MODULE_FOLDER: _MODULE})
    ids = {"true_token_id": tokens[0], "false_token_id": tokens[1] if len(tokens) > 1 else None}
    write_json(folder / _MODULE_FOLDER / "config.json", ids | {"module_input_name": "causal_logits"})
    output = {"method": "forward", "method_output_name": "logits"}
    modalities = {"text": output, "message": output | {"format": "flat"}}
    settings = {"transformer_task": "text-generation", "modality_config": modalities}
    write_json(folder / TRANSFORMER_SETTINGS, settings | {"module_output_name": "causal_logits"})
    shutil.copyfile(directory / "config_sentence_transformers.json", folder / "config_sentence_transformers.json")


def _spec(location: TensorLocation) -> TensorSpec:
    with safe_open(location.path, framework="pt") as file:
        part = file.get_slice(location.key)
        return TensorSpec(DTYPES_BY_NAME[part.get_dtype()], tuple(part.get_shape()))


def _read(location: TensorLocation) -> Tensor:
    with safe_open(location.path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(location.key)
    return tensor
