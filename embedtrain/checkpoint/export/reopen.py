"""Reopening an export as its users will: its files' shapes, plain transformers, sentence-transformers.

Each opens the directory anew, and lets go of the model before the next: never more than one copy is in memory.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from accelerate import init_empty_weights
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from embedtrain.checkpoint.export.probes import PROBES, ExportReference, export_tolerance, require_match
from embedtrain.config.recipe import ModelConfig
from embedtrain.errors import CheckpointError
from embedtrain.models.build import TensorLocation, assemble_encoder, full_state_dict, stored_tensors
from embedtrain.models.encoder import Dense, Encoder
from embedtrain.models.source import ModelSource, open_model_source


def require_shapes(directory: Path, *, trust_remote_code: bool) -> ModelSource:
    """Compare every name and shape in the files with the model that the configuration describes; no weight is read.

    Returns:
        The directory as it will be opened.

    Raises:
        CheckpointError: a weight is missing, left over, or of another shape.
        ModelError: the directory cannot be read.
    """
    source = open_model_source(ModelConfig(path=str(directory), trust_remote_code=trust_remote_code))
    with init_empty_weights(include_buffers=False):
        backbone = AutoModel.from_config(source.config, trust_remote_code=trust_remote_code)
    _compare(directory, stored_tensors(directory), {n: list(t.shape) for n, t in backbone.state_dict().items()})
    for head in source.dense:
        shapes = {"linear.weight": [head.num_out, head.num_in]} | ({"linear.bias": [head.num_out]} if head.bias else {})
        _compare(head.directory, stored_tensors(head.directory), shapes)
    return source


def _compare(directory: Path, stored: dict[str, TensorLocation], shapes: dict[str, list[int]]) -> None:
    for name in sorted(stored.keys() ^ shapes.keys()):
        raise CheckpointError(f"{directory}: {name} is {'left over' if name in stored else 'missing'} in its files")
    for name, place in stored.items():
        with safe_open(place.path, framework="pt") as file:
            found = file.get_slice(place.key).get_shape()
        if found != shapes[name]:
            raise CheckpointError(f"{place.path}: {name} has the shape {found}, the model's is {shapes[name]}")


def check_transformers(directory: Path, source: ModelSource, expected: ExportReference) -> float:
    """Open the directory with transformers alone; the largest relative difference of its vectors.

    Raises:
        CheckpointError: it cannot be opened, not all of it fits, or its vectors are others.
    """
    encoder = open_encoder(directory, source)
    tokenizer = open_tokenizer(directory, source)
    found = torch.cat([encode_batch(encoder, tokenize_padded(tokenizer, [text])) for text in PROBES])
    return require_match(found, expected, f"transformers opens {directory}")


def check_sentence_transformers(directory: Path, source: ModelSource, expected: ExportReference) -> float:
    """Open the directory with sentence-transformers; the largest relative difference of its vectors.

    Raises:
        CheckpointError: it cannot be opened, or its vectors, prompts or length are others.
    """
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(
            str(directory),
            device="cpu",
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            model_kwargs={"dtype": "float32"},
        )
        # prompt="" because a default prompt is the library's affair; the encoder's probes have none.
        vectors = model.encode(list(PROBES), prompt="", convert_to_tensor=True, show_progress_bar=False)
        prompts, length = dict(model.prompts), model.max_seq_length
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot open {directory}: {type(error).__name__}: {error}"
        ) from error
    for name, text in expected.prompts.items():
        if prompts.get(name) != text:
            raise CheckpointError(
                f"sentence-transformers opens {directory} with the prompt {name}={prompts.get(name)!r}, not {text!r}"
            )
    if length != expected.max_length:
        raise CheckpointError(
            f"sentence-transformers opens {directory} for texts of {length} tokens, not {expected.max_length}"
        )
    found = torch.as_tensor(vectors).float().cpu()
    return require_match(found, expected, f"sentence-transformers opens {directory}")


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that an adapter was trained on.

    Attributes:
        source: its configuration as it was trained, and where its weights are.
        seed: of a model without weights.
        rounded: whether the run held its weights in a coarser type than its files have.
        load_in_4bit: whether it held most of them in 4 bits.
    """

    source: ModelSource
    seed: int
    rounded: bool = False
    load_in_4bit: bool = False


def check_adapter(directory: Path, base: AdapterBase, source: ModelSource, expected: ExportReference) -> float:
    """Put the adapter on its base by PEFT; the largest relative difference of its vectors.

    Args:
        directory: the adapter's.
        base: what it was trained on.
        source: the merged model, whose tokenizer it shares.
        expected: what its vectors have to be like.

    Raises:
        CheckpointError: PEFT cannot open it, not all of it fits, or its vectors are others.
    """
    encoder = assemble_encoder(base.source)
    encoder.load_state_dict(full_state_dict(base.source, base.seed))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # PEFT (0.21) only warns of weights that it does not find.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            encoder.backbone = PeftModel.from_pretrained(encoder.backbone, str(directory))
    except Exception as error:
        raise CheckpointError(f"PEFT cannot open {directory}: {type(error).__name__}: {error}") from error
    assert source.directory is not None
    tokenizer = open_tokenizer(source.directory, source)
    found = torch.cat([encode_batch(encoder.eval(), tokenize_padded(tokenizer, [text])) for text in PROBES])
    if base.load_in_4bit:
        return 0.0  # beside it the base is not what it was trained beside: nothing to compare but that it can be opened
    if base.rounded:
        rounding = export_tolerance(torch.bfloat16, exact_encoder=True)
        expected = replace(expected, tolerance=max(expected.tolerance, rounding))
    return require_match(found, expected, f"PEFT opens {directory}")


def open_encoder(directory: Path, source: ModelSource) -> Encoder:
    """The encoder that transformers reads from a directory, in fp32, with our pooling and heads behind it.

    Raises:
        CheckpointError: it cannot be opened, or weights are missing, left over, or of another shape.
    """
    try:
        backbone, report = AutoModel.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # of a model's own code anything
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in report[kind]:
            raise CheckpointError(f"transformers opens {directory}, and reports {kind.replace('_', ' ')}: {name}")
    return add_heads(backbone, source)


def add_heads(backbone: nn.Module, source: ModelSource) -> Encoder:
    """An encoder of a backbone and a directory's pooling, dense heads and normalisation."""
    heads = []
    for facts in source.dense:
        head = Dense(facts.num_in, facts.num_out, bias=facts.bias, activation=facts.activation)
        for name, place in stored_tensors(facts.directory).items():
            with safe_open(place.path, framework="pt") as file:
                head.get_parameter(name).data.copy_(file.get_tensor(place.key))
        heads.append(head)
    return Encoder(cast("PreTrainedModel", backbone), source.pooling, normalize=source.normalize, dense=heads).eval()


def open_tokenizer(directory: Path, source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers alone reads it from a directory.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    return tokenizer


def tokenize_padded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
    """Texts as one padded batch [N, L], cut to the model's length."""
    return tokenizer(texts, padding=True, truncation=True, return_tensors="pt")


def encode_batch(encoder: Encoder, batch: BatchEncoding) -> Tensor:
    """Vectors [N, D] of a batch."""
    with torch.no_grad():
        vectors: Tensor = encoder(batch["input_ids"], batch["attention_mask"])
    return vectors
