"""Texts that an export is compared on, what the encoder makes of them, and how far apart vectors may be."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError
from embedtrain.models.encoder import Encoder

# Short, long, many scripts, nothing but signs, capitals and blanks: what tokenisers and pooling stumble over.
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

# Of what adapters change; below the first it is rounding that is compared.
_MIN_EFFECT, _MIN_EFFECT_FRACTION = 1e-4, 0.5


@dataclass(frozen=True, slots=True)
class ExportReference:
    """What an export has to be like.

    Attributes:
        vectors: the encoder's own of PROBES without prompts, [len(PROBES), D].
        tolerance: largest relative difference of a vector that passes.
        prompts: by name.
        max_length: tokens of a text that are kept.
        without: the encoder's own without its adapters, if it has any.
    """

    vectors: Tensor
    tolerance: float
    prompts: Mapping[str, str]
    max_length: int
    without: Tensor | None = None

    @property
    def effect(self) -> float | None:
        """How far the adapters have moved the vectors, relative to their length."""
        return None if self.without is None else max_relative_difference(self.vectors.float().cpu(), self.without)


def probe_vectors(encoder: Encoder, tokenizer: TextTokenizer) -> Tensor:
    """The vectors of PROBES by an encoder that lies whole in this process, each text alone."""
    ids = tokenizer.ids(PROBES)
    with torch.no_grad():
        chunks = [tokenizer.chunk(ids, [row]) for row in range(len(ids))]
        return torch.cat([encoder.eval()(*chunk.inputs) for chunk in chunks])


def export_tolerance(dtype: torch.dtype, *, exact_encoder: bool) -> float:
    """How far apart vectors may be: rounding of stored weights, and of a bf16 encoder's own arithmetic."""
    if dtype == torch.float32:
        return 1e-4 if exact_encoder else 5e-2
    return 2e-2 if dtype == torch.float16 and exact_encoder else 8e-2


def max_relative_difference(found: Tensor, expected: Tensor) -> float:
    """Of vectors [N, D] from those expected, relative to these; NaN where one is, infinite where sizes differ."""
    if found.shape != expected.shape:
        return float("inf")
    expected = expected.float().cpu()
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def require_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> float:
    """The largest relative difference of vectors [N, D], if it is allowed.

    Args:
        found: to be compared.
        expected: with these.
        tolerance: the largest that passes.
        what: opens what, and gets the vectors found from it.

    Raises:
        CheckpointError: they are further apart, or not finite.
    """
    difference = max_relative_difference(found, expected)
    if not difference <= tolerance:  # also true of NaN
        raise CheckpointError(
            f"{what} but its vectors differ from the encoder's by {difference:.1e} (allowed {tolerance:.0e})"
        )
    return difference


def require_match(found: Tensor, expected: ExportReference, what: str) -> float:
    """The same, and what adapters change is in the vectors.

    Raises:
        CheckpointError: they are further apart, not finite, or those of the model without its adapters.
    """
    difference = require_close(found, expected.vectors, expected.tolerance, what)
    kept = _effect_fraction(found, expected)
    if kept is not None and not kept > _MIN_EFFECT_FRACTION:
        raise CheckpointError(
            f"{what} but only {max(0.0, kept):.0%} of what its adapters change is in its vectors: they are nearly "
            "those of the model it was trained on; where the type of its weights is too coarse for so little, export "
            "as fp32"
        )
    return difference


def _effect_fraction(found: Tensor, expected: ExportReference) -> float | None:
    """How far vectors [N, D] have gone from those without adapters to those with them, 1 being all the way.

    Rounding points anywhere, so it hardly counts along this way. None where there is none to speak of.
    """
    if expected.without is None or (expected.effect or 0.0) < _MIN_EFFECT:
        return None
    without = expected.without.float().cpu()
    way = expected.vectors.float().cpu() - without
    return float(((found - without) * way).sum() / (way * way).sum())
