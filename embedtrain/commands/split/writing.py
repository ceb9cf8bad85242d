"""Writes the rows that remain for training, and the held-out rows as a retrieval set in the layout of BEIR."""

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from embedtrain.commands.split.groups import RowKeys, Split, contains, equality_key
from embedtrain.commands.split.options import DevCorpus
from embedtrain.commands.split.rows import SplitSource
from embedtrain.config.recipe import OnError
from embedtrain.data.rows import Example, format_row
from embedtrain.data.sources.files import file_changed_error
from embedtrain.errors import ConfigError
from embedtrain.utils.files import atomic_write

DEV_FILES = ("dev/corpus.jsonl", "dev/queries.jsonl", "dev/qrels/test.tsv")


@dataclass(slots=True)
class SplitCounts:
    """What was written."""

    train_rows: list[int] = field(default_factory=list)  # of each source
    dev_rows: int = 0
    num_relevant: int = 0  # judged documents
    num_documents: int = 0  # of the held-out corpus
    num_dropped: int = 0  # negatives of training rows that are held-out texts
    num_instructions: int = 0  # held-out rows with an instruction, which the set does not contain


def require_new(output_dir: Path, names: Sequence[str]) -> None:
    """Raise ConfigError if one of the files, or `dev`, exists."""
    for path in (output_dir / name for name in (*names, "dev")):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"output_dir={output_dir}: {path} exists: choose another directory, or delete it")


class _DevSet:
    """The held-out queries, judgements and documents; the documents are written at once."""

    def __init__(self, corpus: TextIO, document_keys: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        self.num_documents = 0
        self._corpus, self._keys = corpus, document_keys
        self._numbers = np.zeros(len(document_keys), dtype=np.int32)  # of written documents, from 1
        self._queries: dict[int, tuple[str, dict[str, None]]] = {}  # text and relevant ids, by the query's key

    def add_document(self, text: str) -> str:
        """The id of a document, which is written if no equal one was."""
        index = int(self._keys.searchsorted(equality_key(text)))
        if not self._numbers[index]:
            self.num_documents += 1
            self._numbers[index] = self.num_documents
            line = {"_id": f"d{self.num_documents}", "title": "", "text": text}
            self._corpus.write(json.dumps(line, ensure_ascii=False) + "\n")
        return f"d{self._numbers[index]}"

    def add_row(self, texts: Example) -> None:
        """Add a query and its positives; those of equal queries are joined."""
        _, relevant = self._queries.setdefault(equality_key(texts.query), (texts.query, {}))
        relevant.update((self.add_document(text), None) for text in texts.positives.texts)

    def write_queries(self, queries: TextIO, judgements: TextIO) -> int:
        """Write queries and judgements; returns the number of judgements."""
        count = 0
        judgements.write("query-id\tcorpus-id\tscore\n")
        for number, (text, relevant) in enumerate(self._queries.values(), 1):
            queries.write(json.dumps({"_id": f"q{number}", "text": text}, ensure_ascii=False) + "\n")
            judgements.writelines(f"q{number}\t{document}\t1\n" for document in relevant)
            count += len(relevant)
        return count


def write_split(
    sources: Sequence[SplitSource],
    split: Split,
    keys: RowKeys,
    output_dir: Path,
    names: Sequence[str],
    corpus: DevCorpus,
    on_error: OnError,
) -> SplitCounts:
    """Write all files, or none. Raises DataError if a file has changed since its keys were computed."""
    counts = SplitCounts()
    with ExitStack() as stack:
        corpus_file, queries, judgements = (stack.enter_context(_new_file(output_dir / name)) for name in DEV_FILES)
        dev = _DevSet(corpus_file, np.unique(np.frombuffer(keys.positives + keys.negatives, dtype=np.int64)))
        number = 0
        for source, name in zip(sources, names, strict=True):
            train = stack.enter_context(_new_file(output_dir / name))
            counts.train_rows.append(0)
            for texts in source.rows(on_error):
                if number >= len(split.query_keys) or equality_key(texts.query) != int(split.query_keys[number]):
                    raise file_changed_error(source.source.path)
                if split.is_held_out[number]:
                    counts.dev_rows += 1
                    counts.num_instructions += bool(texts.instruction)
                    dev.add_row(texts)
                    for text in texts.negatives.texts:
                        if corpus is DevCorpus.all or not contains(split.train_keys, equality_key(text)):
                            dev.add_document(text)
                else:
                    counts.train_rows[-1] += 1
                    counts.num_dropped += _write_row(train, texts, split)
                    if corpus is DevCorpus.all:
                        for text in texts.texts[1:]:
                            dev.add_document(text)
                number += 1
        if number != len(split.query_keys):
            raise file_changed_error(sources[-1].source.path)
        counts.num_relevant = dev.write_queries(queries, judgements)
        counts.num_documents = dev.num_documents
    return counts


def _write_row(file: TextIO, texts: Example, split: Split) -> int:
    """Write a training row without negatives that are held-out texts; returns their number."""
    kept = [
        index
        for index, text in enumerate(texts.negatives.texts)
        if not contains(split.held_out_keys, equality_key(text))
    ]
    negatives = texts.negatives.take(kept)
    scores = (texts.positives.scores, negatives.scores) if texts.positives.scores else None
    file.write(format_row(texts, negatives.texts, negatives.ids, scores) + "\n")
    return len(texts.negatives) - len(kept)


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name when all is written; one named .gz is compressed."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        if path.suffix != ".gz":
            with io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
                yield text
            return
        # Without name and time, so that the same rows give the same bytes.
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed,
            io.TextIOWrapper(cast(io.BufferedWriter, compressed), encoding="utf-8", newline="\n") as text,
        ):
            yield text
