"""The tokens of every text of a source, kept on disk and mapped into memory: made once, and then only looked up.

T: texts, row by row: query, positives, negatives. R: rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.cache import FORMAT, Cache, allow_open_files, json_digest, mapped
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.cache.shared_build import JOINED, Build, Task, build, is_complete
from embedtrain.data.cache.token_files import gathered, join_parts, parts_of_rows, value_type, write_part
from embedtrain.data.text_format import TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import DataError

_NUM_FILES = 4


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens of a source's texts.

    Attributes:
        offsets: int64 [T + 1], the tokens of text t are `values[offsets[t] : offsets[t + 1]]`.
        first: int64 [R + 1], the texts of row r are first[r] to first[r + 1] - 1: query, positives, negatives.
        keys: int64 [T], the key of each text without its prompt, a query's with its row's own instruction; see
            data/keys.py.
        values: the tokens of all texts, uint16 or int32.
        cached: nothing had to be tokenised: all was there already.
    """

    offsets: NDArray[np.int64]
    first: NDArray[np.int64]
    keys: NDArray[np.int64]
    values: NDArray[Any]
    cached: bool = False

    def lengths(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens each of these texts has, special tokens included: int64 [N] from int64 [N]."""
        found: NDArray[np.int64] = self.offsets[texts + 1] - self.offsets[texts]
        return found

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens of these texts, one after the other: int32 [sum of their lengths] from int64 [N]."""
        return gathered(self.values, self.offsets[texts], self.lengths(texts)).astype(np.int32)


@dataclass(frozen=True)
class TokenRequest:
    """A source whose texts are to be tokenised, and their format."""

    rows: RowStore
    text_format: TextFormat

    def notes(self, tokenizer: TextTokenizer) -> list[str]:
        """Lines for the user: lengths that are asked for, and more than the model takes."""
        limit, options = tokenizer.max_length, ("query_max_length", "document_max_length")
        lengths = {option: getattr(self.text_format, option) for option in options}
        return [
            f"{self.rows.report.name}: {option}={length} is more than the model's {limit} tokens, which are kept"
            for option, length in lengths.items()
            if length is not None and length > limit
        ]


def prepare_all(wanted: Sequence[TokenRequest], tokenizer: TextTokenizer, cache: Cache) -> list[TokenStore]:
    """Tokenise every text of several sources, as far as that has not been done before.

    Processes that call this alike share the work, and go on with the next source while others finish one.

    Args:
        wanted: the sources.
        tokenizer: bound to the model's length.
        cache: where tokens are kept.

    Raises:
        DataError: the cache cannot be written, or is cleaned up meanwhile.
        ConfigError: an instruction's format that is none.
    """
    parts = [_Tokens(one, tokenizer, cache) for one in wanted]
    new = [one for one in parts if not is_complete(one.directory)]
    build([one.build for one in new])
    allow_open_files(_NUM_FILES * len(parts))
    return [one.open(cached=one not in new) for one in parts]


class _Tokens:
    """One source's tokens as they are to be kept."""

    def __init__(self, wanted: TokenRequest, tokenizer: TextTokenizer, cache: Cache) -> None:
        self._source, self._rows, self._tokenizer = wanted.rows, wanted.rows.rows, tokenizer
        self._text_format = wanted.text_format.limited_to(tokenizer.max_length)
        decides: dict[str, Any] = vars(self._text_format) | {
            "rows": self._source.key,
            "tokenizer": tokenizer.fingerprint,
        }
        if not self._source.beside & {"instruction", "document_instruction"}:
            del decides["instruction_format"]
        self.directory = cache.directory / f"tokens-{json_digest([FORMAT, decides])}"
        self._names: list[str] = []
        self.build = Build(
            self.directory,
            self._tasks,
            self._join,
            keep=False,
            progress=partial(cache.progress, f"tokenising {self._source.report.name}"),
        )

    def _tasks(self) -> Mapping[str, Task]:
        def task(batches: range) -> Task:
            return partial(write_part, self._rows, batches, self._tokenizer, self._text_format)

        tasks = {f"tokens-{number:06}": task(batches) for number, batches in enumerate(parts_of_rows(self._rows))}
        self._names = list(tasks)
        return tasks

    def _join(self, path: Path) -> None:
        join_parts(self.directory, self._names, self._source, path)

    def open(self, *, cached: bool) -> TokenStore:
        """The tokens, once they are built."""
        joined = self.directory / JOINED
        try:
            offsets, first, keys = (mapped(joined / f"{name}.bin", np.int64) for name in ("offsets", "first", "keys"))
            values = mapped(joined / "values.bin", value_type(self._tokenizer))
        except OSError as error:
            raise DataError(
                f"{self.directory}: cached tokens cannot be opened ({error.strerror or error}): start again, and let "
                "nothing clean up this folder meanwhile"
            ) from error
        return TokenStore(offsets, first, keys, values, cached)
