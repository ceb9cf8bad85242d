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
from embedtrain.data.cache.token_files import Wording, gathered, join_parts, parts_of_rows, value_type, write_part
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import DataError

__all__ = ["TokenStore", "Wanted", "prepare_all", "prepare_tokens"]

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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A source whose texts are to be tokenised.

    Attributes:
        rows: its rows, with texts.
        query_prompt: put before queries of rows that carry no instruction.
        document_prompt: likewise, before documents.
        instruction_format: how an instruction and a text are put together.
        query_max_length: tokens of a query that are kept, special tokens included; None: the model's.
        document_max_length: likewise, of a document.
    """

    rows: RowStore
    query_prompt: str
    document_prompt: str
    instruction_format: str
    query_max_length: int | None
    document_max_length: int | None

    def notes(self, tokenizer: TextTokenizer) -> list[str]:
        """Lines for the user: lengths that are asked for, and more than the model takes."""
        asked = {"query_max_length": self.query_max_length, "document_max_length": self.document_max_length}
        most = tokenizer.max_length
        return [
            f"{self.rows.report.name}: {option}={length} is more than the model's {most} tokens, which are kept"
            for option, length in asked.items()
            if length is not None and length > most
        ]


def prepare_all(wanted: Sequence[Wanted], tokenizer: TextTokenizer, cache: Cache) -> list[TokenStore]:
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


def prepare_tokens(
    rows: RowStore,
    tokenizer: TextTokenizer,
    *,
    query_prompt: str,
    document_prompt: str,
    instruction_format: str,
    query_max_length: int | None,
    document_max_length: int | None,
    cache: Cache,
) -> TokenStore:
    """The same for one source; see Wanted."""
    one = Wanted(
        rows=rows,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        instruction_format=instruction_format,
        query_max_length=query_max_length,
        document_max_length=document_max_length,
    )
    return prepare_all([one], tokenizer, cache)[0]


class _Tokens:
    """One source's tokens as they are to be kept."""

    def __init__(self, wanted: Wanted, tokenizer: TextTokenizer, cache: Cache) -> None:
        self._source, self._rows, self._tokenizer = wanted.rows, wanted.rows.rows, tokenizer
        self._wording = Wording(
            query_prompt=wanted.query_prompt,
            document_prompt=wanted.document_prompt,
            instruction_format=wanted.instruction_format,
            query_max_length=_least(wanted.query_max_length, tokenizer.max_length),
            document_max_length=_least(wanted.document_max_length, tokenizer.max_length),
        )
        decides: dict[str, Any] = vars(self._wording) | {"rows": self._source.key, "tokenizer": tokenizer.fingerprint}
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
            return partial(write_part, self._rows, batches, self._tokenizer, self._wording)

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


def _least(wanted: int | None, most: int) -> int:
    return most if wanted is None else min(wanted, most)
