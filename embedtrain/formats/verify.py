"""Verification of an export: reopen it as its users will, encode probe texts, compare with the encoder's embeddings.

Checks: names and shapes in the files, plain transformers, sentence-transformers, PEFT. Each reopens the directory and
frees the model before the next one, so that at most one copy is in memory.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedtrain.config.kinds import kind_of_files
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError
from embedtrain.formats.sentence_transformers import BATCH_SIZE
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import compare_shapes
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
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

# Two computations in bf16 differ from that in fp32 about equally, with other errors. Independent vectors differ by 1.4.
_MAX_OWN_ROUNDINGS, _MAX_TOLERANCE = 2.0, 0.5
# Two computations in fp32 with the same weights.
_EXACT_TOLERANCE = 1e-4


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
    # Outputs of the export in bf16 and in fp32, if the encoder computes in bf16. Called for vectors that do not pass.
    rounding: Callable[[], tuple[Tensor, Tensor]] | None = None
    same_weights: bool = True  # whether what is compared has the weights of the export, which `rounding` reads

    def truncated(self, dimension: int | None) -> "ExportReference":
        """The same for the first dimensions of the vectors; None: all."""
        return self._of_columns(slice(dimension))

    def of_compared(self) -> "ExportReference":
        """The same for the pairs whose scores are compared."""
        return self if self.compared is None else replace(self._of_columns(self.compared), compared=None)

    def _of_columns(self, columns: slice | Tensor) -> "ExportReference":
        base, rounding = self.base_vectors, self.rounding

        def of_columns() -> tuple[Tensor, Tensor]:
            assert rounding is not None
            in_bf16, in_fp32 = rounding()
            return in_bf16[:, columns], in_fp32[:, columns]

        return replace(
            self,
            vectors=self.vectors[:, columns],
            base_vectors=None if base is None else base[:, columns],
            rounding=None if rounding is None else of_columns,
        )

    def of_bf16(self, source: ModelSource, tokenizer: TextTokenizer) -> "ExportReference":
        """The same for an encoder in bf16 that the directory of `source` has to reproduce, read once if at all.

        The rounding of bf16 grows with the depth of a model, and with its training: no constant is a limit for all.
        """
        return replace(self, rounding=functools.cache(lambda: _bf16_and_fp32(source, tokenizer, self.prompts)))

    def allowed(self, difference: float) -> float:
        """The largest difference that passes, where an export has this one: twice its own rounding if it is above."""
        if difference <= self.tolerance or self.rounding is None:
            return self.tolerance
        rounded = max_relative_difference(*self.rounding())
        return max(self.tolerance, min(_MAX_OWN_ROUNDINGS * rounded, _MAX_TOLERANCE))

    def describe_raised(self, difference: float) -> Iterator[str]:
        """A line for the console, if an export with this difference passes by its own rounding alone."""
        allowed = self.allowed(difference)
        if allowed > self.tolerance:
            yield (
                f"outputs in bf16 differ by {difference:.1e} from the encoder's, more than {self.tolerance:.0e}: the "
                f"limit was raised to {allowed:.1e} for the rounding of this model; in fp32 the libraries reproduce "
                f"its weights within {_EXACT_TOLERANCE:.0e}"
            )

    @classmethod
    def of(cls, encoder: Encoder, source: ModelSource, tokenizer: TextTokenizer, tolerance: float) -> "ExportReference":
        """The outputs of an encoder that is unsharded in this process."""
        return cls(
            probe_outputs(encoder, source, tokenizer),
            tolerance,
            source.prompts,
            tokenizer.max_length,
            compared=source.kind.files.compared(tokenizer, source.prompts),
        )


def probe_outputs(encoder: Encoder, source: ModelSource, tokenizer: TextTokenizer) -> Tensor:
    """The outputs of an encoder in this process for PROBES; see `ModelFiles.probe`."""
    files = source.kind.files
    return files.probe(encoder.eval(), tokenizer, source.prompts, torch.device("cpu"))


def _bf16_and_fp32(source: ModelSource, tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> tuple[Tensor, Tensor]:
    """The outputs of a directory's weights for PROBES by arithmetic in bf16, and in fp32."""
    encoder, files = assemble_encoder(source), source.kind.files
    encoder.load_state_dict(full_state_dict(source, seed=0))
    padded, device = tokenizer.with_packing(False), torch.device("cpu")
    exact = files.probe(encoder.float().eval(), padded, prompts, device)
    encoder.to(torch.bfloat16)
    for tower in encoder.towers.values():
        if tower.float32_head is not None:  # which computes in float32 in any precision
            tower.float32_head.float()
    return files.probe(encoder, padded, prompts, device), exact


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


def describe_check(difference: float, allowed: float) -> str:
    """A comparison that has passed, for a message."""
    return f"largest difference {difference:.1e}, allowed {allowed:.0e}"


def require_close(
    vectors: Tensor, expected: Tensor, tolerance: float, subject: str, *, of: str = "the encoder's"
) -> float:
    """The largest relative difference of vectors [N, D]; CheckpointError if it is above `tolerance` or NaN.

    `subject` starts the error message, such as "transformers opens DIR"; `of` says what is expected.
    """
    difference = max_relative_difference(vectors, expected)
    if not difference <= tolerance:  # also true of NaN
        raise CheckpointError(
            f"{subject} but its outputs differ from {of} by {difference:.1e} (allowed {tolerance:.0e})"
        )
    return difference


def require_match(vectors: Tensor, reference: ExportReference, subject: str) -> float:
    """Like `require_close`, and CheckpointError if the embeddings hardly contain the effect of the adapters.

    A limit that is raised for a model's own rounding would hide faults of that size, such as a lost prompt. They are no
    rounding: what libraries compute in fp32 then has to be what the encoder computes with these weights in fp32.
    Of columns that are not compared, nothing is required.
    """
    if reference.compared is not None:
        vectors, reference = vectors[:, reference.compared], reference.of_compared()
        if not vectors.numel():
            return 0.0
    tolerance = reference.allowed(max_relative_difference(vectors, reference.vectors))
    difference = require_close(vectors, reference.vectors, tolerance, subject)
    if tolerance > reference.tolerance and reference.rounding is not None and reference.same_weights:
        _, exact = reference.rounding()
        require_close(vectors, exact, _EXACT_TOLERANCE, subject, of="those of the same weights in fp32")
    fraction = _effect_fraction(vectors, reference)
    if fraction is not None and not fraction > _MIN_EFFECT_FRACTION:
        raise CheckpointError(
            f"{subject} but its outputs contain only {max(0.0, fraction):.0%} of the effect of its adapters: they "
            "are nearly those of the base model; if the type of the weights is too coarse for such a small change, "
            "export as fp32"
        )
    return difference


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


def require_shapes(directory: Path, *, trust_remote_code: bool) -> ModelSource:
    """Open the directory, and compare all names and shapes in its files with its configuration; reads no weights.

    Raises CheckpointError if a weight is missing, unexpected, or of another shape.
    """
    kind = kind_of_files(directory)[0]
    source = open_model_source(kind.model_options(path=str(directory), trust_remote_code=trust_remote_code))
    for folder, shapes in source.kind.files.stored_shapes(source).items():
        compare_shapes(folder, shapes)
    return source


def check_transformers(directory: Path, source: ModelSource, reference: ExportReference) -> float:
    """Open the directory with plain transformers; the largest relative difference of its embeddings or scores."""
    outputs = source.kind.files.of_transformers(directory, source)
    return require_match(outputs, reference, f"transformers opens {directory}")


def check_sentence_transformers(directory: Path, source: ModelSource, reference: ExportReference) -> float:
    """Open the directory with sentence-transformers; the largest relative difference of its embeddings.

    Raises CheckpointError if embeddings, prompts or maximum length differ.
    """
    files = source.kind.files
    outputs = files.of_sentence_transformers(directory, source, reference.prompts, reference.max_length)
    if outputs is None:
        return 0.0
    reference = reference.truncated(files.num_computed(source))
    return require_match(outputs, reference, f"sentence-transformers opens {directory}")


def probes_of_sentence_transformer(model: Any) -> Tensor:
    """Embeddings of PROBES, [len(PROBES), D], without a prompt, even if the model has one by default."""
    vectors = model.encode(
        list(PROBES), prompt="", batch_size=BATCH_SIZE, convert_to_tensor=True, show_progress_bar=False
    )
    return torch.as_tensor(vectors).float().cpu()
