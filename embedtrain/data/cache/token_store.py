"""The tokens of all texts of a source on disk: written once, then memory-mapped.

T: texts, row by row: query, positives, negatives. R: rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedtrain.data.cache.cache import (
    FORMAT,
    JOINED,
    Build,
    Cache,
    Task,
    allow_open_files,
    build,
    concatenate_files,
    is_complete,
    json_digest,
    map_array,
)
from embedtrain.data.cache.row_store import ArrowRows, RowStore
from embedtrain.data.rows import Prompt, TextFormat, instructed_query, text_key
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.data.types import NOT_POOLED, TextRole, Tokens, gather_ranges
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.formatting import format_count

ROWS_PER_PART = 1 << 14
BYTES_PER_PART = 64 << 20
# A tokenizer needs many times the memory of its texts.
TEXTS_PER_CALL = 1024
CHARACTERS_PER_CALL = 1 << 21
BLOCK = 1 << 20
UNPOOLED = "unpooled.bin"
FLAGS = "flags.bin"


def flag_files(layout: Layout) -> list[str]:
    """The file of the flags of a layout's cached tokens; none if they have none."""
    return [FLAGS] if layout.flags_tokens else [UNPOOLED] if layout.caches_flags else []


def parts_of_rows(rows: ArrowRows) -> list[range]:
    """The batches of a store, split into parts of similar size that are tokenised separately."""
    parts: list[range] = []
    start, num_rows, num_bytes = 0, 0, 0
    for batch, (count, size) in enumerate(zip(np.diff(rows.batch_starts), rows.batch_bytes, strict=True)):
        num_rows, num_bytes = num_rows + int(count), num_bytes + int(size)
        if num_rows >= ROWS_PER_PART or num_bytes >= BYTES_PER_PART:
            parts.append(range(start, batch + 1))
            start, num_rows, num_bytes = batch + 1, 0, 0
    if start < len(rows.batch_bytes):
        parts.append(range(start, len(rows.batch_bytes)))
    return parts


def value_type(tokenizer: TextTokenizer) -> Any:
    """The smallest integer type of all token ids."""
    return np.uint16 if tokenizer.max_token_id <= np.iinfo(np.uint16).max else np.int32


def write_part(rows: ArrowRows, batches: range, tokenizer: TextTokenizer, text_format: TextFormat, path: Path) -> None:
    """Tokenise the texts of some batches of rows, and write them as a folder.

    It has `values.bin`, the concatenated tokens; `lengths.bin`, int32 [T]; `keys.bin`, int64 [T]; and, if the layout
    caches flags, `unpooled.bin`, int32 [T], how many of the first tokens of each text are not pooled, or if it flags
    tokens, `flags.bin`, uint8 of each token.
    """
    path.mkdir()
    distinct = _DistinctTexts(tokenizer, value_type(tokenizer))
    names = ["values.bin", "lengths.bin", "keys.bin", *flag_files(tokenizer.layout)]
    with ExitStack() as stack:
        files = {name: stack.enter_context((path / name).open("wb")) for name in names}
        for number in batches:
            batch = rows.batch(number)
            texts = distinct.numbers(list(_texts(batch, text_format, tokenizer)))
            lengths = distinct.lengths[texts]
            arrays = {
                "values.bin": gather_ranges(distinct.values, distinct.offsets[:-1][texts], lengths),
                "lengths.bin": lengths.astype(np.int32),
                "keys.bin": distinct.keys[texts],
                UNPOOLED: distinct.unpooled[texts].astype(np.int32),
                FLAGS: gather_ranges(distinct.flags, distinct.offsets[:-1][texts], lengths),
            }
            if FLAGS in files:
                tokens = Tokens(arrays["values.bin"].astype(np.int32), arrays[FLAGS], lengths.astype(np.int64))
                tokenizer.layout.check_rows(tokens, _num_documents(batch), tokenizer.max_length)
            for name, file in files.items():
                file.write(arrays[name].data.cast("B"))


class _TextOptions(NamedTuple):
    """What determines the tokens and the key of a text, besides the text."""

    prompt: Prompt
    limit: int  # tokens
    instruction: str | None = None  # of a query, from its row
    role: TextRole = TextRole.document  # of a query only where its tokens depend on it


def _texts(
    batch: pa.RecordBatch, text_format: TextFormat, tokenizer: TextTokenizer
) -> Iterator[tuple[str, _TextOptions]]:
    """The texts of a batch of rows in order, with their options."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    nothing = [None] * batch.num_rows
    instructions = [
        columns[name].to_pylist() if name in columns else nothing for name in ("instruction", "document_instruction")
    ]
    queries: dict[str | None, _TextOptions] = {}  # hundreds of thousands of rows share a few instructions
    documents: dict[str | None, _TextOptions] = {}
    layout = tokenizer.layout
    query_limit = tokenizer.limit(TextRole.query, text_format.query_max_length)
    document_limit = tokenizer.limit(TextRole.document, text_format.document_max_length)
    role = TextRole.query if layout.roles_differ else TextRole.document
    texts = (columns[name].to_pylist() for name in ("query", "positives", "negatives"))
    for query, positives, negatives, of_query, of_documents in zip(*texts, *instructions, strict=True):
        if of_query not in queries:
            prompt = layout.query_prompt(text_format.query(of_query))
            queries[of_query] = _TextOptions(prompt, query_limit, of_query or None, role)
        if of_documents not in documents:
            prompt = layout.document_prompt(text_format.document(of_documents))
            documents[of_documents] = _TextOptions(prompt, document_limit)
        yield query, queries[of_query]
        options = documents[of_documents]
        for text in positives:
            yield text, options
        for text in negatives:
            yield text, options


def tokenise_queries(
    queries: Sequence[tuple[str, str | None]], text_format: TextFormat, tokenizer: TextTokenizer
) -> Tokens:
    """The tokens of queries that are in no store, pairs of a text and the instruction of its row, as a store has them.

    The order is kept. At least one query.
    """
    text_format, layout = text_format.limited_to(tokenizer.max_length), tokenizer.layout
    role = TextRole.query if layout.roles_differ else TextRole.document
    limit = tokenizer.limit(TextRole.query, text_format.query_max_length)
    of_instruction: dict[str | None, list[int]] = {}
    for number, (_, instruction) in enumerate(queries):
        of_instruction.setdefault(instruction, []).append(number)
    parts, order = [], list[int]()
    for instruction, numbers in of_instruction.items():
        prompt = layout.query_prompt(text_format.query(instruction))
        texts = [prompt(queries[number][0]) for number in numbers]
        parts.append(layout.tokenize(texts, limit, prompt.prefix, role))
        order += numbers
    return Tokens.concatenated(parts).take(np.argsort(order))


def _num_documents(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Documents of each row of a batch."""
    positives, negatives = (
        pc.list_value_length(batch.column(name)).to_numpy(zero_copy_only=False).astype(np.int64)
        for name in ("positives", "negatives")
    )
    total: NDArray[np.int64] = positives + negatives
    return total


class _DistinctTexts:
    """The tokens of the U distinct texts of a part so far."""

    def __init__(self, tokenizer: TextTokenizer, dtype: Any) -> None:
        self.values: NDArray[Any] = np.empty(0, dtype=dtype)  # concatenated
        self.flags = np.empty(0, dtype=np.uint8)  # of these
        self.lengths, self.keys, self.unpooled = (np.empty(0, dtype=np.int64) for _ in range(3))  # [U]
        self.offsets = np.zeros(1, dtype=np.int64)  # [U + 1]
        self._layout = tokenizer.layout
        self._numbers: dict[_TextOptions, dict[str, int]] = {}

    def numbers(self, texts: Sequence[tuple[str, _TextOptions]]) -> NDArray[np.int64]:
        """The index of each text among the distinct texts; new texts are tokenised."""
        indices = np.empty(len(texts), dtype=np.int64)
        new: dict[_TextOptions, list[str]] = {}
        count = len(self.lengths)
        waiting: list[tuple[int, _TextOptions, str]] = []
        for index, (text, options) in enumerate(texts):
            numbers = self._numbers.setdefault(options, {})
            number = numbers.get(text)
            if number is None:
                numbers[text] = number = -1
                new.setdefault(options, []).append(text)
            if number < 0:
                waiting.append((index, options, text))
            indices[index] = number
        for options, new_texts in new.items():
            self._add(options, new_texts)
            self._numbers[options].update(zip(new_texts, range(count, count + len(new_texts)), strict=True))
            count += len(new_texts)
        for index, options, text in waiting:
            indices[index] = self._numbers[options][text]
        return indices

    def _add(self, options: _TextOptions, texts: list[str]) -> None:
        values, flags, lengths, unpooled = [self.values], [self.flags], [self.lengths], [self.unpooled]
        for batch in _batches(texts):
            prompted = [options.prompt(text) for text in batch]
            tokens = self._layout.tokenize(prompted, options.limit, options.prompt.prefix, options.role)
            lengths.append(tokens.lengths)
            values.append(tokens.ids.astype(self.values.dtype))
            flags.append(tokens.flags)
            unpooled.append(tokens.count(NOT_POOLED))
        self.values, self.lengths, self.unpooled = map(np.concatenate, (values, lengths, unpooled))
        self.flags = np.concatenate(flags)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        keys = np.fromiter(
            (text_key(instructed_query(text, options.instruction)) for text in texts),
            dtype=np.int64,
            count=len(texts),
        )
        self.keys = np.concatenate([self.keys, keys])


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and (len(batch) == TEXTS_PER_CALL or characters + len(text) > CHARACTERS_PER_CALL):
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def join_parts(directory: Path, names: Sequence[str], rows: RowStore, path: Path) -> None:
    """Concatenate the tokens of the parts `names` in `directory`, and write the offsets of texts and rows.

    The folder has `values.bin`, `keys.bin`, `unpooled.bin` or `flags.bin` if parts have it, `offsets.bin` (int64
    [T + 1]) and `row_starts.bin` (int64 [R + 1]).
    """
    path.mkdir()
    flags = (name for name in (UNPOOLED, FLAGS) if (directory / names[0] / name).exists())
    for name in ("values.bin", "keys.bin", *flags):
        concatenate_files((directory / part / name for part in names), path / name)
    _write_sums(path / "offsets.bin", (map_array(directory / part / "lengths.bin", np.int32) for part in names))
    positives, negatives = rows.num_positives, rows.num_negatives
    blocks = (slice(start, start + BLOCK) for start in range(0, len(rows), BLOCK))
    _write_sums(path / "row_starts.bin", (1 + positives[block] + negatives[block] for block in blocks))


def _write_sums(path: Path, counts: Iterator[NDArray[np.int32]]) -> None:
    """Write the cumulative sums of the counts, from 0: int64, one more than there are counts."""
    total = 0
    with path.open("wb") as file:
        file.write(np.zeros(1, dtype=np.int64).data.cast("B"))
        for block in counts:
            sums = total + np.cumsum(block, dtype=np.int64)
            if len(sums):
                file.write(sums.data.cast("B"))
                total = int(sums[-1])


_NUM_FILES = 5


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens of all texts of a source, memory-mapped.

    Attributes:
        offsets: int64 [T + 1], the tokens of text t are `values[offsets[t] : offsets[t + 1]]`.
        row_starts: int64 [R + 1], the texts of row r are row_starts[r] to row_starts[r + 1] - 1: query, positives,
            negatives.
        keys: int64 [T], hashes of the texts without prompts, of queries with the instruction of their row.
        values: the tokens of all texts, uint16 or int32.
        unpooled: int32 [T], how many of the first tokens of each text are not pooled; None: all are pooled, or `flags`
            say it.
        flags: uint8, of each token; None without pictures and chunks.
    """

    offsets: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    keys: NDArray[np.int64]
    values: NDArray[Any]
    unpooled: NDArray[np.int32] | None = None
    flags: NDArray[np.uint8] | None = None
    cached: bool = False  # whether all tokens were in the cache

    def lengths(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens of each of these texts, including special tokens: int64 [N] from int64 [N]."""
        lengths: NDArray[np.int64] = self.offsets[texts + 1] - self.offsets[texts]
        return lengths

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        """The tokens of these texts, int64 [N], as `Layout.tokenize` gave them."""
        lengths = self.lengths(texts)
        ids = gather_ranges(self.values, self.offsets[texts], lengths).astype(np.int32)
        if self.flags is not None:
            return Tokens(ids, gather_ranges(self.flags, self.offsets[texts], lengths), lengths)
        if self.unpooled is None:
            return Tokens.plain(ids, lengths)
        return Tokens.with_unpooled(ids, lengths, self.unpooled[texts])


@dataclass(frozen=True)
class TokenRequest:
    """A source whose texts are to be tokenised, and their format."""

    rows: RowStore
    text_format: TextFormat

    def notes(self, tokenizer: TextTokenizer) -> list[str]:
        """Lines for the user: maximal lengths above the model's."""
        limit, options = tokenizer.max_length, ("query_max_length", "document_max_length")
        lengths = {option: getattr(self.text_format, option) for option in options}
        return [
            f"{self.rows.report.name}: {option}={length} is more than the model's {limit} tokens, which are kept"
            for option, length in lengths.items()
            if length is not None and length > limit
        ]


def prepare_all(requests: Sequence[TokenRequest], tokenizer: TextTokenizer, cache: Cache) -> list[TokenStore]:
    """Tokenise all texts of several sources that are not in the cache.

    Processes that call this with the same arguments share the work.

    Raises:
        DataError: the cache cannot be written, or was cleaned up during the build.
        ConfigError: an invalid instruction format, or pictures for a model of texts.
    """
    for report in (request.rows.report for request in requests):
        if report.num_pictures and not tokenizer.layout.reads_pictures:
            raise ConfigError(
                f"{report.name}: its rows have {format_count(report.num_pictures, 'picture')}, and the model reads "
                "texts alone: name columns of texts, or choose a model of texts and pictures (model.kind=image_text)"
            )
    entries = [_CachedTokens(request, tokenizer, cache) for request in requests]
    missing = [entry for entry in entries if not is_complete(entry.directory)]
    build([entry.build for entry in missing])
    for entry in entries:
        if entry not in missing:
            cache.verification.add(entry.directory)
    allow_open_files(_NUM_FILES * len(entries))
    return [entry.open(cached=entry not in missing) for entry in entries]


class _CachedTokens:
    """The tokens of one source in the cache."""

    def __init__(self, request: TokenRequest, tokenizer: TextTokenizer, cache: Cache) -> None:
        self._source, self._rows, self._tokenizer = request.rows, request.rows.rows, tokenizer
        self._text_format = request.text_format.limited_to(tokenizer.max_length)
        key_parts: dict[str, Any] = vars(self._text_format) | {
            "rows": self._source.key,
            "tokenizer": tokenizer.fingerprint,
        }
        if self._source.report.num_pictures:  # a picture may be replaced in a file that the rows only name
            key_parts["content"] = self._source.content
        if not self._source.extra_columns & {"instruction", "document_instruction"}:
            del key_parts["instruction_format"]
        self.directory = cache.directory / f"tokens-{json_digest([FORMAT, key_parts])}"
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
        """The tokens, after they are built."""
        joined = self.directory / JOINED
        try:
            offsets, row_starts, keys = (
                map_array(joined / f"{name}.bin", np.int64) for name in ("offsets", "row_starts", "keys")
            )
            values = map_array(joined / "values.bin", value_type(self._tokenizer))
            names = flag_files(self._tokenizer.layout)
            unpooled = map_array(joined / UNPOOLED, np.int32) if UNPOOLED in names else None
            flags = map_array(joined / FLAGS, np.uint8) if FLAGS in names else None
        except OSError as error:
            raise DataError(
                f"{self.directory}: cached tokens cannot be opened ({error.strerror or error}): start again, and let "
                "nothing clean up this folder meanwhile"
            ) from error
        return TokenStore(offsets, row_starts, keys, values, unpooled, flags, cached)
