"""Random numbers and permutations as functions of a key: any element is computed without those before it.

They determine the rows of a batch, so a run that resumes years later on another machine must get the same numbers. All
of this is arithmetic on unsigned 64-bit integers, which is the same on every platform and with every version of NumPy.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014). The
permutation is a Feistel network over two digits of unequal base with addition instead of XOR, and cycle walking for
values beyond n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It is not meant for secrets.
"""

from enum import IntEnum, unique
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
Whole: TypeAlias = NDArray[np.int64]

# The largest range that can be permuted.
MAX_SIZE = 2**40

_ROUNDS = 12
_WORD = 2**64
_START = 0x243F6A8885A308D3
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


@unique
class Purpose(IntEnum):
    """What random numbers of a seed are for: uses of one purpose would draw the same numbers.

    A value never changes: runs that resume, and repeated commands, would draw others.
    """

    row_order = 1  # of a source
    source_order = 2  # of an epoch
    batch_order = 3  # of the rows of a batch of which a share is mixed
    documents = 4  # a row's positive and negatives
    mixed_rows = 5  # the sources of the rows that are mixed into batches by source
    filter_parts = 6  # the random partition of `filter`
    batch_negatives = 7  # documents of other rows of the batch
    mined_negatives = 8  # `mine` with sampling=random
    deleted_words = 9  # of queries, with `delete_words`


def make_key(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A key, 0 to 2^64 - 1, of a seed, a purpose and integers in this order, each below 2^64."""
    return int(random_bits(_START, seed, purpose, *numbers)[0])


def make_keys(seed: int, purpose: Purpose, *numbers: int | Whole) -> Words:
    """`make_key` of each tuple of numbers: uint64 [N]; arrays are int64 [N]."""
    return random_bits(_START, seed, purpose, *numbers)


def random_bits(key: int | Words, *counters: int | Whole) -> Words:
    """64 random bits for each tuple of counters: uint64 [N], N the length of the arrays among the arguments.

    Args:
        key: a number, or uint64 [N].
        counters: numbers from 0, or int64 [N].
    """
    state = _words(key)
    for counter in counters:
        state = _mix(state + (_words(counter) + _ONE) * _STEP)
    return state


def random_uniform(key: int | Words, *counters: int | Whole) -> NDArray[np.float64]:
    """A random number in [0, 1) for each tuple of counters, as `random_bits`: float64 [N]."""
    return (random_bits(key, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_below(random: Words, limits: int | Whole) -> Whole:
    """A random integer from 0 to limit - 1 from random bits: int64 [N].

    Args:
        random: uint64 [N], of `random_bits`.
        limits: above 0, at most 2^24; a number or int64 [N]. One number is likelier than another by 2^-16 at most.
    """
    return _scale(random, _words(limits)).astype(np.int64)


def permute(indices: Whole, n: int | Whole, key: int | Words) -> Whole:
    """The values of a permutation of range(n) at these indices: int64 [N].

    No array of length n is built. Every order occurs; for five to about a dozen elements their frequencies differ by a
    few per cent.

    Args:
        indices: int64 [N], each from 0 to n - 1.
        n: 1 to 2^40, one number or int64 [N].
        key: of the permutation, a number or uint64 [N].
    """
    sizes, keys = _words(n), _words(key)
    if not indices.size:
        return np.empty(0, dtype=np.int64)
    assert int(sizes.max()) <= MAX_SIZE
    assert int(indices.min()) >= 0
    assert bool((indices.astype(np.uint64) < sizes).all())
    left_base = _left_base(sizes)
    right_base = (sizes + left_base - _ONE) // left_base
    out = _feistel(indices.astype(np.uint64), left_base, right_base, keys)
    # The digits hold a little more than n values. A value beyond n is permuted again until it is below n: this follows
    # a cycle of the permutation, so the results are distinct.
    beyond = np.flatnonzero(out >= sizes)
    while beyond.size:
        of = [values if len(values) == 1 else values[beyond] for values in (left_base, right_base, keys, sizes)]
        again = _feistel(out[beyond], *of[:3])
        out[beyond] = again
        beyond = beyond[again >= of[3]]
    return out.astype(np.int64)


def _left_base(sizes: Words) -> Words:
    """The least even number whose square is at least n.

    With an odd base every round would be an even permutation if the right base is odd too: half of all orders would
    never occur.
    """
    root = np.sqrt((sizes - _ONE).astype(np.float64)).astype(np.uint64) + _ONE
    return root + (root & _ONE)


def _feistel(values: Words, left_base: Words, right_base: Words, keys: Words) -> Words:
    left, right = np.divmod(values, right_base)
    for number in range(_ROUNDS):
        random = random_bits(keys, number)
        if number % 2 == 0:
            left = _add_modulo(left, _scale(_mix(random + (right + _ONE) * _STEP), left_base), left_base)
        else:
            right = _add_modulo(right, _scale(_mix(random + (left + _ONE) * _STEP), right_base), right_base)
    return left * right_base + right


def _add_modulo(values: Words, more: Words, base: Words) -> Words:
    total = values + more
    # A wrapped difference is huge, so the smaller of the two is the remainder; far cheaper than a division.
    out: Words = np.minimum(total, total - base)
    return out


def _scale(random: Words, limits: Words) -> Words:
    return ((random >> np.uint64(24)) * limits) >> np.uint64(40)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> _SHIFTS[0])) * _MIX[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MIX[1]
    return words ^ (words >> _SHIFTS[2])


def _words(numbers: int | Words | Whole) -> Words:
    """At least one-dimensional, because NumPy warns when a scalar wraps around, which is intended here."""
    if isinstance(numbers, np.ndarray):
        return np.atleast_1d(numbers).astype(np.uint64, copy=False)
    assert 0 <= numbers < _WORD
    return np.array([numbers], dtype=np.uint64)
