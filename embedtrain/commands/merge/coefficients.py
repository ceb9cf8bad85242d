"""The coefficients of models in a merged tensor, from the models' weights and inner products.

Every method except TIES is a linear combination of the tensors x_i of the models. Of slerp, the combination depends on
the angles between them, which the Gram matrix G_ij = <x_i, x_j> has. So vectors are represented here by their
coefficients, and tensors are read once for G and once for the result.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedtrain.commands.merge.options import SlerpOrder

Matrix = NDArray[np.float64]
# Above this cosine, and between tensors that are 0, slerp is linear: the sine of the angle has no digits left.
_PARALLEL = 1 - 1e-7
_MAX_ITERATIONS, _TOLERANCE = 100, 1e-9


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights with the sum 1."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def slerp_coefficients(gram: Matrix, weights: Sequence[float], order: SlerpOrder) -> list[float]:
    """Coefficients of the spherical interpolation of models with the Gram matrix [N, N].

    Of two models with weights 1 - t and t: (sin((1 - t) a) x_0 + sin(t a) x_1) / sin a, with the angle a between them.
    The vectors themselves are interpolated, not their directions. Weights of 0 leave models out exactly.
    """
    used = [index for index, weight in enumerate(weights) if weight]
    if len(used) > 2 and order is SlerpOrder.karcher:
        return _karcher(gram, normalized(weights))
    result = np.zeros(len(weights))
    result[used[0]] = 1.0
    total = weights[used[0]]
    for index in used[1:]:
        total += weights[index]
        other = np.zeros(len(weights))
        other[index] = 1.0
        first, second = _pair(gram, result, other, weights[index] / total)
        result = first * result + second * other
    return [float(value) for value in result]


def _pair(gram: Matrix, a: Matrix, b: Matrix, t: float) -> tuple[float, float]:
    """Factors of two combinations of the models."""
    product, norm = float(a @ gram @ b), math.sqrt(max(0.0, float(a @ gram @ a) * float(b @ gram @ b)))
    cosine = product / norm if norm else 1.0
    if not abs(cosine) <= _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _karcher(gram: Matrix, weights: Sequence[float]) -> list[float]:
    """The point of the sphere with the least weighted sum of squared angles, times the weighted mean norm.

    It is the fixed point of m -> exp_m(sum_i w_i log_m(u_i)), with the directions u_i of the models.
    """
    norms = np.sqrt(np.maximum(0.0, np.diag(gram)))
    if not norms.all():
        return list(weights)
    directions = gram / np.outer(norms, norms)
    shares = np.array(weights)
    mean = shares.copy()  # in terms of the directions
    for _ in range(_MAX_ITERATIONS):
        length = math.sqrt(max(0.0, float(mean @ directions @ mean)))
        if length < _TOLERANCE:
            return list(weights)  # opposite directions have no mean
        mean = mean / length
        cosines = np.clip(directions @ mean, -1.0, 1.0)
        angles = np.arccos(cosines)
        sines = np.sin(angles)
        # log_m(u) = angle / sin(angle) x (u - cos(angle) m), whose limit at angle 0 is u - m.
        factors = np.where(sines > _TOLERANCE, angles / np.maximum(sines, _TOLERANCE), 1.0) * shares
        tangent = factors - float(factors @ cosines) * mean
        step = math.sqrt(max(0.0, float(tangent @ directions @ tangent)))
        if step < _TOLERANCE:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
    return [float(value) for value in mean * float(shares @ norms) / norms]


def with_base(weights: Sequence[float], scale: float) -> list[float]:
    """Coefficients of models, and of their base at the end: base + scale x sum_i w_i (x_i - base)."""
    return [*(scale * weight for weight in weights), 1 - scale * math.fsum(weights)]


def cosine_and_distance(gram: Matrix, first: int, second: int) -> tuple[float, float]:
    """Of two models."""
    norms = math.sqrt(float(gram[first, first]) * float(gram[second, second]))
    squared = float(gram[first, first] + gram[second, second] - 2 * gram[first, second])
    return (float(gram[first, second]) / norms if norms else 1.0), math.sqrt(max(0.0, squared))
