"""What is mined: training sources as they are read, and what stands around their texts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.read_sources import read_sources
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.parts import Part
from embedtrain.data.sources.resolve import (
    NO_IN_BATCH_NEGATIVES,
    expand_sources,
    find_parts,
    no_in_batch_negatives,
    source_names,
)
from embedtrain.data.text_format import TextFormat
from embedtrain.data.types import Example
from embedtrain.errors import DataError
from embedtrain.mine.options import MineOptions


@dataclass(frozen=True, order=True, slots=True)
class DocumentFormat:
    """How documents are seen: what stands before and after each, and how many tokens of it are kept."""

    before: str
    after: str
    max_length: int | None

    def __call__(self, text: str) -> str:
        """The text as the model sees it."""
        return f"{self.before}{text}{self.after}"


@dataclass(frozen=True, kw_only=True)
class MiningSource:
    """One source: its rows, and what holds for all of them.

    Attributes:
        name: of the source, and of the file that is written for it.
        store: its rows.
        document_parts: the corpus that its rows name documents of, if they do: all of it is searched.
        text_format: prompts, instruction format and maximal lengths.
    """

    name: str
    store: RowStore
    document_parts: Sequence[Part]
    text_format: TextFormat

    def query(self, row: Example) -> tuple[str, str]:
        """A row's query as the model sees it, and what it begins with that is a prompt."""
        prompt = self.text_format.query(row.instruction)
        return prompt(row.query), prompt.prefix

    def wording(self, document_instruction: str | None) -> DocumentFormat:
        """How the documents of a row with this instruction are seen."""
        prompt = self.text_format.document(document_instruction)
        return DocumentFormat(prompt.prefix, prompt.suffix, self.text_format.document_max_length)

    def identity(self) -> dict[str, Any]:
        """What decides about what is found for it."""
        return {"rows": self.store.key, **asdict(self.text_format)}


def read_mining_sources(options: MineOptions, prompts: Mapping[str, str], cache: Cache) -> list[MiningSource]:
    """Read and check every row of every source.

    Args:
        options: of the door.
        prompts: the model's, by name: `query` and `document`.
        cache: where rows are kept.

    Raises:
        DataError: a row that cannot be used, with file and line, or a file that cannot be read.
        ConfigError: options of a source that contradict each other.
    """
    # What a step draws of a row's negatives does not matter here, and would only be told.
    try:
        sources = [replace(source, negatives=None) for source in expand_sources(options.data)]
    except DataError as error:
        raise _with_split(error, options.data) from error.__cause__
    stores = read_sources(sources, OnError.stop, TEXTS_ONLY, cache)

    default = TextFormat(
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        instruction_format=options.instruction_format,
    )
    return [
        MiningSource(
            name=name,
            store=store,
            document_parts=find_parts(source).document_parts,
            text_format=TextFormat.of(source, default),
        )
        for name, source, store in zip(_names(sources), sources, stores, strict=True)
    ]


def _with_split(error: DataError, sources: Sequence[TrainSource]) -> DataError:
    """The error, and what to write where only the split of a BEIR folder is another than `train`."""
    other = re.search(r"holds no judgements of split=\S+, only of (\w+)", str(error))
    path = next((source.path for source in sources if str(error).startswith(f"{source.path}: ")), None)
    if other is None or path is None:
        return error
    return DataError(f"{error}; write data=[{{path: {path}, split: {other[1]}}}]")


def _names(sources: Sequence[TrainSource]) -> list[str]:
    """A distinct name for each source, which says so if its rows may not serve as each other's negatives.

    The folder that said so is not the one that mined rows lie in, and training reads it off the path.
    """
    named = [
        replace(source, name=f"{name}-{NO_IN_BATCH_NEGATIVES}")
        if not name.endswith(NO_IN_BATCH_NEGATIVES)
        and (no_in_batch_negatives(source) if source.in_batch_negatives is None else not source.in_batch_negatives)
        else replace(source, name=name)
        for name, source in zip(source_names(sources), sources, strict=True)
    ]
    return source_names(named)
