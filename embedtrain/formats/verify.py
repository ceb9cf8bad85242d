"""Verification of an export: reopen it as its users will, encode probe texts, compare with the encoder's embeddings.

Checks: names and shapes in the files, plain transformers, sentence-transformers, PEFT. Each reopens the directory and
frees the model before the next one, so that at most one copy is in memory.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedtrain.data.m3 import M3Tokenizer
from embedtrain.data.pairs import PairTokenizer
from embedtrain.data.static_queries import StaticQueryTokenizer
from embedtrain.data.token_rows import TokenRowTokenizer
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.errors import CheckpointError
from embedtrain.formats.cross_encoder import (
    classifier_scores,
    probe_scores,
    scores_of_sentence_transformers,
    scores_of_transformers,
    whole_classifier,
)
from embedtrain.formats.late_interaction import (
    probe_token_vectors,
    token_vectors_of_sentence_transformers,
    token_vectors_of_transformers,
)
from embedtrain.formats.m3 import m3_of_transformers, probe_m3
from embedtrain.formats.reopen import open_encoder, open_tokenizer, tokenize_padded
from embedtrain.formats.sentence_transformers import BATCH_SIZE, load_model, opening
from embedtrain.formats.sparse import (
    probe_words,
    word_weights_of_sentence_transformers,
    word_weights_of_transformers,
)
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.models.static_embedding import is_static
from embedtrain.models.types import ModelSource

# Short, long, many scripts, punctuation only, capitals and whitespace: where tokenizers and pooling go wrong.
PROBES = (
    "a",
    "What is the capital of France?",
    "如何在多个 GPU 上训练向量模型？",
    "Die Straße ist naß, naïve café, 東京タワー, Привет, мир, مرحبا",
    "1234 + 5678 = 6912; #!?",
    "नमस्ते दुनिया 안녕하세요 สวัสดีชาวโลก 🚀👩‍👩‍👧",
    "  UPPER case,\ttwo\n\nlines  ",
    " ".join(f"A sentence of middle length, number {i}." for i in range(4)),
    " ".join(f"A longer text is cut where the model's length ends, sentence {i}." for i in range(200)),
)

# Adapters that change embeddings by less than the first are not checked, because the difference is mostly rounding,
# which is larger for an encoder in bf16.
_MIN_EFFECT, MIN_BF16_EFFECT, _MIN_EFFECT_FRACTION = 1e-4, 1e-2, 0.5


@dataclass(frozen=True, slots=True)
class ExportReference:
    """The encoder that an export has to reproduce."""

    vectors: Tensor  # the result of `probe_vectors`
    tolerance: float  # largest relative difference of an embedding that passes
    prompts: Mapping[str, str]  # by name
    max_length: int  # tokens
    base_vectors: Tensor | None = None  # of PROBES with the adapters disabled
    min_effect: float = _MIN_EFFECT  # relative difference of embeddings by adapters that is no rounding
    compared: Tensor | None = None  # bool [len(PROBES)], the scores that are compared; None: all

    def truncated(self, dimension: int | None) -> "ExportReference":
        """The same for the first dimensions of the vectors; None: all."""
        base = None if self.base_vectors is None else self.base_vectors[:, :dimension]
        return replace(self, vectors=self.vectors[:, :dimension], base_vectors=base)

    def of_compared(self) -> "ExportReference":
        """The same for the pairs whose scores are compared."""
        if self.compared is None:
            return self
        base = None if self.base_vectors is None else self.base_vectors[:, self.compared]
        return replace(self, vectors=self.vectors[:, self.compared], base_vectors=base, compared=None)


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """An adapter of a run, and the model that it was trained on."""

    directory: Path  # of its adapter_config.json
    source: ModelSource  # the model as it was trained, and the location of its weights
    seed: int  # initialises a model without weights
    rounded: bool = False  # whether the run held its weights in a coarser type than its files
    load_in_4bit: bool = False  # whether the run quantized its linear layers


def probe_vectors(encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str] | None = None) -> Tensor:
    """Embeddings of PROBES by an encoder that is unsharded in this process, one text per forward pass.

    The scores [1, N] of a cross-encoder, with `prompts`, are one vector: a score near 0 has no relative difference.
    A model of three representations has a summary of them, see `probe_m3`.
    Static queries: see `probe_words`. A late-interaction model has vectors of tokens, of each text as a query and as a
    document with their prompts.
    """
    if isinstance(tokenizer, PairTokenizer):
        return probe_scores(encoder.eval(), tokenizer, PROBES, prompts or {}, torch.device("cpu"))
    if isinstance(tokenizer, TokenRowTokenizer):
        return probe_token_vectors(encoder.eval(), tokenizer, PROBES, prompts or {}, torch.device("cpu"))
    if isinstance(tokenizer, M3Tokenizer):
        return probe_m3(encoder.eval(), tokenizer, PROBES, torch.device("cpu"))
    if isinstance(tokenizer, StaticQueryTokenizer):
        return probe_words(encoder.eval(), tokenizer, PROBES, torch.device("cpu"))
    ids = tokenizer.ids(PROBES)
    with torch.no_grad():
        chunks = [tokenizer.chunk(ids, [row]) for row in range(len(ids))]
        return torch.cat([encoder.eval()(chunk) for chunk in chunks])


def export_tolerance(dtype: torch.dtype, *, exact_encoder: bool) -> float:
    """Largest relative difference that rounding explains: of stored weights, and of a bf16 encoder's arithmetic."""
    if dtype == torch.float32:
        return 1e-4 if exact_encoder else 5e-2
    return 2e-2 if dtype == torch.float16 and exact_encoder else 8e-2


def max_relative_difference(vectors: Tensor, expected: Tensor) -> float:
    """Largest difference of vectors [N, D], relative to the norms of `expected`; infinite if shapes differ.

    A norm below their mean counts as the mean: a sparse model may have a few small weights for a text, or none, and
    rounding of the hidden states does not shrink with them.
    """
    if vectors.shape != expected.shape:
        return float("inf")
    expected = expected.float().cpu()
    norms = expected.norm(dim=1)
    return float(((vectors - expected).norm(dim=1) / norms.clamp(min=max(float(norms.mean()), 1e-12))).max())


def require_close(vectors: Tensor, expected: Tensor, tolerance: float, subject: str) -> float:
    """The largest relative difference of vectors [N, D]; CheckpointError if it is above `tolerance` or NaN.

    `subject` starts the error message, such as "transformers opens DIR".
    """
    difference = max_relative_difference(vectors, expected)
    if not difference <= tolerance:  # also true of NaN
        raise CheckpointError(
            f"{subject} but its outputs differ from the encoder's by {difference:.1e} (allowed {tolerance:.0e})"
        )
    return difference


def require_match(vectors: Tensor, reference: ExportReference, subject: str) -> float:
    """Like `require_close`, and CheckpointError if the embeddings hardly contain the effect of the adapters."""
    difference = require_close(vectors, reference.vectors, reference.tolerance, subject)
    fraction = _effect_fraction(vectors, reference)
    if fraction is not None and not fraction > _MIN_EFFECT_FRACTION:
        raise CheckpointError(
            f"{subject} but its outputs contain only {max(0.0, fraction):.0%} of the effect of its adapters: they "
            "are nearly those of the base model; if the type of the weights is too coarse for such a small change, "
            "export as fp32"
        )
    return difference


def _require_scores(scores: Tensor, reference: ExportReference, subject: str) -> float:
    """`require_match` for the scores [1, N] of those pairs that are compared."""
    compared = reference.of_compared()
    if reference.compared is not None:
        scores = scores[:, reference.compared]
    return require_match(scores, compared, subject) if scores.numel() else 0.0


def _effect_fraction(vectors: Tensor, reference: ExportReference) -> float | None:
    """Projection of vectors [N, D] on the change by the adapters: 0 is the base model, 1 the adapted one.

    Rounding has no preferred direction, so it hardly contributes. None if the adapters change next to nothing.
    """
    if reference.base_vectors is None:
        return None
    expected, base = reference.vectors.float().cpu(), reference.base_vectors.float().cpu()
    if max_relative_difference(expected, base) < reference.min_effect:
        return None
    change = expected - base
    return float(((vectors - base) * change).sum() / (change * change).sum())


def check_transformers(directory: Path, source: ModelSource, reference: ExportReference) -> float:
    """Open the directory with plain transformers; the largest relative difference of its embeddings or scores."""
    if source.kind.name == "cross_encoder":
        scores = scores_of_transformers(directory, source, open_tokenizer(directory, source), PROBES)
        return _require_scores(scores, reference, f"transformers opens {directory}")
    if source.kind.name == "sparse":
        weights = word_weights_of_transformers(directory, source, open_tokenizer(directory, source), PROBES)
        return require_match(weights, reference, f"transformers opens {directory}")
    vectors = _encode(open_encoder(directory, source), source, open_tokenizer(directory, source))
    return require_match(vectors, reference, f"transformers opens {directory}")


def _encode(encoder: Encoder, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """`probe_vectors` of a model of vectors that transformers has opened."""
    if source.kind.name == "late_interaction":
        return token_vectors_of_transformers(encoder, source, tokenizer, PROBES)
    if source.kind.name == "m3":
        return m3_of_transformers(encoder, source, tokenizer, PROBES)
    return encode_probes(encoder.eval(), tokenizer)


def check_sentence_transformers(directory: Path, source: ModelSource, reference: ExportReference) -> float:
    """Open the directory with sentence-transformers; the largest relative difference of its embeddings.

    Raises CheckpointError if embeddings, prompts or maximum length differ.
    """
    if source.kind.name == "cross_encoder":
        scores = scores_of_sentence_transformers(directory, source, reference.max_length, PROBES)
        return _require_scores(scores, reference, f"sentence-transformers opens {directory}")
    if source.kind.name == "late_interaction":
        vectors = token_vectors_of_sentence_transformers(directory, source, PROBES)
        return require_match(vectors, reference, f"sentence-transformers opens {directory}")
    if source.kind.name == "sparse":
        weights = word_weights_of_sentence_transformers(directory, source, PROBES)
        return require_match(weights, reference, f"sentence-transformers opens {directory}")
    with opening(directory):
        model = load_model("SentenceTransformer", directory, source)
        vectors = probes_of_sentence_transformer(model)
        prompts, length = dict(model.prompts), model.max_seq_length
    for name, text in reference.prompts.items():
        if prompts.get(name) != text:
            raise CheckpointError(
                f"sentence-transformers opens {directory} with the prompt {name}={prompts.get(name)!r}, not {text!r}"
            )
    # A StaticEmbedding cuts texts in its tokenizer, and reports no length.
    if length != reference.max_length and not is_static(source.config):
        raise CheckpointError(
            f"sentence-transformers opens {directory} for texts of {length} tokens, not {reference.max_length}"
        )
    # Of a model of three representations, sentence-transformers computes the first.
    reference = reference.truncated(source.truncate_dim if source.kind.name != "m3" else source.dimension)
    return require_match(vectors, reference, f"sentence-transformers opens {directory}")


def probes_of_sentence_transformer(model: Any) -> Tensor:
    """Embeddings of PROBES, [len(PROBES), D], without a prompt, even if the model has one by default."""
    vectors = model.encode(
        list(PROBES), prompt="", batch_size=BATCH_SIZE, convert_to_tensor=True, show_progress_bar=False
    )
    return torch.as_tensor(vectors).float().cpu()


def check_logit_score(directory: Path, source: ModelSource, reference: ExportReference) -> float:
    """Open a folder that `write_logit_score` wrote with sentence-transformers; the largest difference of its scores.

    `source` is the exported classifier.
    """
    scores = scores_of_sentence_transformers(directory, source, reference.max_length, PROBES)
    return _require_scores(scores, reference, f"sentence-transformers opens {directory}")


def check_adapter(directory: Path, base: AdapterBase, source: ModelSource, reference: ExportReference) -> float:
    """Load the adapter on its base model with PEFT; the largest relative difference of its embeddings.

    `source` is the merged model, whose tokenizer the adapter shares.
    """
    weights = full_state_dict(base.source, base.seed)
    if base.source.kind.name != "cross_encoder":
        encoder = assemble_encoder(base.source)
        encoder.load_state_dict(weights)
        model: nn.Module = encoder.backbone
    else:
        model = whole_classifier(base.source, weights)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # PEFT (0.21) only warns about missing weights.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = PeftModel.from_pretrained(model, str(directory))
    except Exception as error:
        raise CheckpointError(f"PEFT cannot open {directory}: {type(error).__name__}: {error}") from error
    assert source.directory is not None
    tokenizer = open_tokenizer(source.directory, source)
    if base.source.kind.name != "cross_encoder":
        encoder.backbone = model
        vectors = _encode(encoder, source, tokenizer)
    else:
        vectors = classifier_scores(model, source, tokenizer, PROBES)
    if base.load_in_4bit:
        return 0.0  # the adapter was trained on the quantized base, not on this one: embeddings are not comparable
    if base.rounded:
        rounding = export_tolerance(torch.bfloat16, exact_encoder=True)
        reference = replace(reference, tolerance=max(reference.tolerance, rounding))
    subject = f"PEFT opens {directory}"
    return (require_match if base.source.kind.name != "cross_encoder" else _require_scores)(vectors, reference, subject)


def encode_probes(encoder: Encoder, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Embeddings of PROBES, [len(PROBES), D], one text per forward pass."""
    batches = (tokenize_padded(tokenizer, [text]) for text in PROBES)
    with torch.no_grad():
        return torch.cat([encoder(Chunk(batch["input_ids"], batch["attention_mask"])) for batch in batches])
