"""Values that ranks send to each other, as JSON and numbers: whoever reaches the network can change them, not run code.

torch's collectives of objects unpickle what they receive, and a pickle may execute anything.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from embedtrain.errors import EmbedtrainError

_JSON_TYPES = frozenset({type(None), bool, int, float, str})
_NUMBER_KINDS = "biuf"  # of numpy types whose bytes are numbers
_HEADER_BYTES = 8  # the length of the JSON, before it


def encode(value: object, types: Sequence[type] = ()) -> bytes:
    """The message that `decode` turns into an equal value of the same types.

    Values are None, bool, int, float, str, bytes, numbers and arrays of numpy, lists, tuples, sets and dicts of them,
    and dataclasses and enums in `types`, not their subclasses. Raises TypeError for any other, because the other ranks
    would get something else.
    """
    blocks: list[bytes] = []
    by_type = {kind: kind.__name__ for kind in types}
    text = json.dumps(_to_json(value, by_type, blocks), ensure_ascii=False, separators=(",", ":"))
    head = text.encode("utf-8", "surrogatepass")  # file names that are not UTF-8 have surrogates
    return b"".join((len(head).to_bytes(_HEADER_BYTES, "little"), head, *blocks))


def decode(message: bytes | memoryview, types: Sequence[type] = ()) -> Any:
    """The value of a message; raises EmbedtrainError if `encode` cannot have written it.

    No class except those in `types` is constructed.
    """
    view = memoryview(message)
    end = _HEADER_BYTES + int.from_bytes(view[:_HEADER_BYTES], "little")
    try:
        head = json.loads(bytes(view[_HEADER_BYTES:end]).decode("utf-8", "surrogatepass"))
        return _Reader(view[end:], {kind.__name__: kind for kind in types}).value(head)
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise EmbedtrainError(
            f"a message of another rank cannot be read ({type(error).__name__}: {str(error)[:100]}): all hosts must "
            "run the same version of embedtrain, and no other program may connect to its ports"
        ) from error


def _to_json(value: object, types: dict[type, str], blocks: list[bytes]) -> object:
    kind = type(value)
    if kind in _JSON_TYPES:
        return value
    if isinstance(value, (list, tuple, set)) and kind in (list, tuple, set):
        items = _items(value, types, blocks)
        return items if kind is list else {kind.__name__: items}
    if isinstance(value, dict) and kind is dict:
        return {"dict": [_items(value.keys(), types, blocks), _items(value.values(), types, blocks)]}
    if isinstance(value, bytes) and kind is bytes:
        blocks.append(value)
        return {"bytes": len(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _NUMBER_KINDS:
        blocks.append(value.tobytes())
        is_array = isinstance(value, np.ndarray)
        return {"array" if is_array else "number": [value.dtype.str, list(value.shape)]}
    if isinstance(value, Enum) and kind in types:
        return {types[kind]: value.name}
    if is_dataclass(value) and kind in types:
        return {types[kind]: _items([getattr(value, field.name) for field in fields(value)], types, blocks)}
    raise TypeError(f"{value!r:.100} of type {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks")


def _items(values: Iterable[object], types: dict[type, str], blocks: list[bytes]) -> list[object]:
    values = list(values)
    if _JSON_TYPES.issuperset(map(type, values)):  # such as ten thousand texts
        return values
    return [_to_json(value, types, blocks) for value in values]


class _Reader:
    """Reads a value; bytes and numbers come from `blocks`, in order."""

    def __init__(self, blocks: memoryview, types: dict[str, type]) -> None:
        self._blocks, self._types = blocks, types

    def value(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return encoded if _JSON_TYPES.issuperset(map(type, encoded)) else [self.value(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        [(name, content)] = encoded.items()
        match name:
            case "tuple":
                return tuple(self.value(content))
            case "set":
                return set(self.value(content))
            case "dict":
                keys, values = content
                return dict(zip(self.value(keys), self.value(values), strict=True))
            case "bytes":
                return bytes(self._block(content))
            case "array" | "number":
                return self._numbers(*content, is_array=name == "array")
        kind = self._types[name]
        return kind[content] if issubclass(kind, Enum) else kind(*self.value(content))

    def _numbers(self, dtype_name: str, shape: list[int], *, is_array: bool) -> Any:
        dtype = np.dtype(dtype_name)
        if dtype.kind not in _NUMBER_KINDS:
            raise ValueError(f"{dtype_name} is no type of numbers")
        array = np.frombuffer(self._block(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
        return array.copy() if is_array else array[()]

    def _block(self, size: int) -> memoryview:
        if not 0 <= size <= len(self._blocks):
            raise ValueError("it is cut off")
        block, self._blocks = self._blocks[:size], self._blocks[size:]
        return block


def broadcast_value(value: object, types: Sequence[type], group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value on every rank of a group, which must have a backend for tensors on the CPU."""
    message = _as_tensor(encode(value, types)) if dist.get_rank(group) == 0 else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)])
    dist.broadcast(length, src=0, group=group)
    if dist.get_rank(group) != 0:
        message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, src=0, group=group)
    return decode(message.numpy().data, types)


def gather_values(value: object, types: Sequence[type], group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, in rank order, on every rank of a group, as in `broadcast_value`."""
    message, size = _as_tensor(encode(value, types)), dist.get_world_size(group)
    lengths = torch.empty(size, 1, dtype=torch.int64)
    dist.all_gather(list(lengths), torch.tensor([len(message)]), group=group)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)  # all_gather needs the same size on every rank
    padded[: len(message)] = message
    messages = torch.empty(size, len(padded), dtype=torch.uint8)
    dist.all_gather(list(messages), padded, group=group)
    return [decode(row[:n].numpy().data, types) for row, n in zip(messages, lengths[:, 0].tolist(), strict=True)]


def _as_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
