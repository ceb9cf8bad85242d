"""From documents to drafts: which queries are asked for each document, and what the answers say.

What is asked for a document is a function of the seed and its text alone, so that other documents, ranks and
interruptions change nothing.
"""

import collections
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from embedtrain.commands.synthesize.checks import (
    DUPLICATE,
    NEAR_DUPLICATE,
    ROUND_TRIP,
    TITLES,
    DraftChecks,
    Duplicate,
    Refiner,
    Tally,
    document_ranks,
    find_duplicates,
)
from embedtrain.commands.synthesize.prompts import (
    QUERY_KINDS,
    Prompts,
    QueryKind,
    language_name,
    parse_answer,
    queries_schema,
    texts_in,
)
from embedtrain.commands.synthesize.report import REPORT_FILE, Written, write_report
from embedtrain.commands.synthesize.types import Asker, Draft, Estimate, Refusal, RefusalReason, Reply, Request
from embedtrain.config.columns import DataPath
from embedtrain.config.command_line import flatten
from embedtrain.config.compose import to_plain
from embedtrain.config.options import is_in_result
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.rows import text_key
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.parts import SourcePart
from embedtrain.data.sources.reader import DocumentReader
from embedtrain.data.sources.values import BadRow, shorten
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.first_stage import bm25_rankings
from embedtrain.evaluation.readers.retrieval import has_document_ids, read_examples
from embedtrain.evaluation.types import Corpus
from embedtrain.mining.options import FilterOptions
from embedtrain.mining.pool import corpus_parts
from embedtrain.tracking.console import Console
from embedtrain.tracking.pages import Page
from embedtrain.utils.files import (
    atomic_write,
    checksum_of,
    expand_user,
    make_folder,
    remove_tree,
    require_own_file,
)
from embedtrain.utils.records import read_record

if TYPE_CHECKING:
    from embedtrain.commands.synthesize import QueriesConfig, SynthesizeOptions, WindowConfig

# Documents whose queries are asked for together; the second document of multi_hop is one of them.
BLOCK_DOCUMENTS = 2048
_MAX_EXAMPLES = 10_000  # rows of the user's that examples are drawn from
_NEIGHBOUR_CHARACTERS = 2000  # of a document, by which BM25 looks for another one
# Words of text between spaces; of Chinese, Japanese, Korean and Thai, which have no spaces, two characters.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]{{1,2}}|[^\s{_UNSPACED}]{{1,40}}")
_SEEDS = 2**31  # servers take a 32-bit integer


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document that queries are written for; `key` is the hash of its text, `file` where it is from."""

    id: str
    text: str
    file: str
    key: int


def uniform(*names: object) -> float:
    """A number from 0 to below 1 that depends on the names alone; those of other names are independent of it."""
    digest = hashlib.blake2b(repr(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


class Documents:
    """The distinct documents of `corpus`, in order, read anew each time.

    Attributes:
        parts: the files, folders and data sets.
        counts: of the last complete reading: `documents`, `duplicates` (of an earlier text), `empty` and `skipped`
            ones (rows that cannot be used, with on_error=skip).
        digest: of their ids and texts, when the last one has been read.
        skipped: the first row that was skipped, and why.

    Raises DataError for a file, or a row, that cannot be used.
    """

    def __init__(
        self, corpus: Sequence[DataPath], on_error: OnError = OnError.stop, max_documents: int | None = None
    ) -> None:
        self.parts = corpus_parts(corpus)
        self.counts: collections.Counter[str] = collections.Counter()
        self.skipped, self.digest = "", ""
        self._on_error, self._limit = on_error, max_documents

    def __iter__(self) -> Iterator[SourceDocument]:
        self.counts.clear()
        known: set[int] = set()
        digest = xxh3_64()
        for document in self._all():
            if self._limit is not None and len(known) == self._limit:
                break
            if document.key in known:
                self.counts["duplicates"] += 1
                continue
            known.add(document.key)
            self.counts["documents"] += 1
            digest.update(f"{len(document.id)}:{document.id}{document.key}".encode("utf-8", "surrogatepass"))
            yield document
        self.digest = digest.hexdigest()
        if not known:
            names = ", ".join(part.name for part in self.parts)
            raise DataError(f"corpus: there is no document with a text in {shorten(names, 200)}")

    def blocks(self) -> Iterator[list[SourceDocument]]:
        """The documents, some thousand at a time."""
        block: list[SourceDocument] = []
        for document in self:
            block.append(document)
            if len(block) == BLOCK_DOCUMENTS:
                yield block
                block = []
        if block:
            yield block

    def _all(self) -> Iterator[SourceDocument]:
        for part in self.parts:
            read = self._documents if has_document_ids(part) is not None else self._documents_of_rows
            for name, text in read(part):
                if text.strip():
                    yield SourceDocument(name, text, part.name, text_key(text))
                else:
                    self.counts["empty"] += 1

    def _documents(self, part: SourcePart) -> Iterator[tuple[str, str]]:
        reader = DocumentReader([part], part.name, ids_required=False)
        for line, document in reader.documents(PartPiece(part)):
            problem: str | None = None
            if isinstance(document, BadRow):
                problem = str(document)
            elif document.pictures:
                problem = "has a picture, and queries are written for texts alone"
            else:
                # As mining compares it with texts of rows.
                yield document.id, document.full_text if document.title else document.text
                continue
            location = f"{part.location(line)}: {problem}"
            if self._on_error is OnError.stop:
                raise DataError(location)
            self.counts["skipped"] += 1
            self.skipped = self.skipped or location

    def _documents_of_rows(self, part: SourcePart) -> Iterator[tuple[str, str]]:
        for _, row in read_examples(TrainSource(path=part.name)):
            if not len(row.documents):
                yield "", row.query
            yield from zip(row.documents.all_ids, row.documents.texts, strict=True)


@dataclass(frozen=True, slots=True)
class ExampleQuery:
    """A query of the user's with a document, as prompts show it."""

    query: str
    document: str
    key: int  # of the whole document


def read_example_queries(sources: Sequence[TrainSource], words: int) -> list[ExampleQuery]:
    """The first rows of the user's, in order; documents have at most so many words."""
    examples: list[ExampleQuery] = []
    for source in sources:
        for place, row in read_examples(source):
            if not len(row.positives):
                raise DataError(f"queries.examples, {source.path}:{place}: a row needs a query and a positive")
            document = row.positives.texts[0]
            examples.append(ExampleQuery(row.query, windows_of(document, words, 0)[0], text_key(document)))
            if len(examples) == _MAX_EXAMPLES:
                return examples
    return examples


def windows_of(text: str, words: int, overlap: int) -> list[str]:
    """The windows of a text, each of at most so many words; one that repeats only words of the one before is left out.

    A text that is not longer is its own only window, unchanged.
    """
    places = [match.span() for match in _WORD.finditer(text)]
    if len(places) <= words:
        return [text]
    starts = range(0, len(places) - overlap, words - overlap)
    return [text[places[start][0] : places[min(start + words, len(places)) - 1][1]] for start in starts]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for queries, and what the drafts of its answer have."""

    request: Request
    kind: str
    count: int  # of queries
    language: str | None
    sources: tuple[str, ...]
    positives: tuple[str, ...]
    ids: tuple[str, ...]


# How many queries are asked for, by kind, language and number of the window.
Plan = dict[tuple[str, str | None, int], int]


class QueryWriter:
    """Decides which queries are asked for each document, and reads the answers.

    Attributes:
        prompts: the templates.
        kinds: of the queries that are asked for.
        counts: queries that became no draft, by why: see `LOSSES`; and answers that were `repaired`.
        num_asked: queries that were asked for.
    """

    def __init__(self, options: "SynthesizeOptions", prompts: Prompts, examples: Sequence[ExampleQuery]) -> None:
        self.prompts = prompts
        self.counts: collections.Counter[str] = collections.Counter()
        self._queries: QueriesConfig = options.queries
        self._window: WindowConfig = options.window
        self._of_windows = options.window.positive.value == "window"
        self._seed, self._examples = options.seed, examples
        self._max_new_tokens, self._temperature = options.writer.max_new_tokens, options.writer.temperature
        total = sum(self._queries.kinds.values())
        self._shares = [(kind, share / total) for kind, share in self._queries.kinds.items()]
        self.kinds = [kind for kind, _ in self._shares]
        self.num_asked = 0
        unknown = [kind for kind in self.kinds if kind not in prompts.kinds]
        if unknown:
            raise ConfigError(
                f"queries.kinds.{unknown[0]}: there is no prompt of this name, only {', '.join(prompts.kinds)}; "
                f"prompts=DIR with a file {unknown[0]}.jinja adds one"
            )
        for kind in self.kinds:
            self._require_usable(kind)

    def _require_usable(self, kind: str) -> None:
        documents = ["A document."] * _kind(kind).num_documents
        example = {"query": "a query", "document": "A document."}
        values = {"documents": documents, "count": 2, "examples": [example], "language": "German"}
        self.prompts.require_usable(kind, values)

    def requests(self, block: Sequence[SourceDocument], world: World) -> list[Asked]:
        """What is asked for these documents, in their order. A collective: rank 0 looks for neighbours."""
        plans: list[Plan] = []
        with world.fail_together("choosing kinds of queries"):
            plans = [self._plan(document) for document in block]
        pairs = [index for index, plan in enumerate(plans) if any(_kind(kind).num_documents > 1 for kind, *_ in plan)]
        others = neighbours(block, pairs, world) if pairs else {}
        asked: list[Asked] = []
        with world.fail_together("writing prompts"):
            for index, plan in enumerate(plans):
                other = block[others[index]] if index in others else None
                asked += self._of_document(block[index], plan, other)
        return asked

    def _of_document(self, document: SourceDocument, plan: Plan, other: SourceDocument | None) -> Iterator[Asked]:
        windows = self._windows(document)
        self.num_asked += self._queries.per_document
        for (kind, language, window), count in plan.items():
            chosen = [(document, windows, window)]
            if _kind(kind).num_documents > 1:
                if other is None:
                    self.counts["alone"] += count
                    continue
                chosen.append((other, self._windows(other), 0))
            yield self._ask(kind, language, count, chosen)

    def _windows(self, document: SourceDocument) -> list[str]:
        return windows_of(document.text, self._window.words, self._window.overlap)

    def _plan(self, document: SourceDocument) -> Plan:
        """What is asked for a document: windows take turns, in an order of chance."""
        num_windows = len(self._windows(document))
        order = sorted(range(num_windows), key=lambda window: uniform(self._seed, document.key, "window", window))
        plan: Plan = {}
        for number in range(self._queries.per_document):
            kind = _choose(self._shares, uniform(self._seed, document.key, "kind", number))
            language = None
            if _kind(kind).has_language:
                languages = [(code, 1 / len(self._queries.languages)) for code in self._queries.languages]
                language = _choose(languages, uniform(self._seed, document.key, "language", number))
            key = kind, language, order[number % num_windows]
            plan[key] = plan.get(key, 0) + 1
        return plan

    def _ask(
        self, kind: str, language: str | None, count: int, chosen: Sequence[tuple[SourceDocument, list[str], int]]
    ) -> Asked:
        documents = [document for document, _, _ in chosen]
        sources = tuple(windows[window] for _, windows, window in chosen)
        keys = tuple(document.key for document in documents)
        place = (self._seed, *keys, kind, language, *(window for *_, window in chosen))
        messages = self.prompts.render(
            kind,
            documents=list(sources),
            count=count,
            examples=[{"query": each.query, "document": each.document} for each in self._choose_examples(place, keys)],
            language=None if language is None else language_name(language),
        )
        request = Request(
            messages=messages,
            purpose="queries",
            schema=queries_schema(count, has_instruction=_kind(kind).has_instruction),
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
            seed=int(uniform(*place, "seed") * _SEEDS),
        )
        is_window = [self._of_windows and len(windows) > 1 for _, windows, _ in chosen]
        return Asked(
            request=request,
            kind=kind,
            count=count,
            language=language,
            sources=sources,
            positives=tuple(
                source if cut else document.text
                for source, document, cut in zip(sources, documents, is_window, strict=True)
            ),
            ids=tuple(
                f"{document.id}#{window + 1}" if cut and document.id else document.id
                for (document, _, window), cut in zip(chosen, is_window, strict=True)
            ),
        )

    def _choose_examples(self, place: tuple[object, ...], keys: Sequence[int]) -> list[ExampleQuery]:
        """Rows of the user's, of other documents: the query of this one would be copied."""
        if not self._examples:
            return []
        chosen: dict[int, None] = {}
        for number in range(4 * self._queries.num_examples):
            index = int(uniform(*place, "example", number) * len(self._examples))
            if self._examples[index].key not in keys:
                chosen[index] = None
            if len(chosen) == self._queries.num_examples:
                break
        return [self._examples[index] for index in chosen]

    def drafts(self, asked: Sequence[Asked], replies: Sequence[Reply]) -> list[Draft]:
        """The queries of the answers, in order; what is thrown away is counted."""
        return [draft for each, reply in zip(asked, replies, strict=True) for draft in self._drafts(each, reply)]

    def _drafts(self, asked: Asked, reply: Reply) -> Iterator[Draft]:
        if isinstance(reply, Refusal):
            self.counts[f"no_answer_{reply.reason.name}"] += asked.count
            return
        parsed = parse_answer(reply.text)
        if parsed is None:
            self.counts["cut" if reply.finish == "length" else "unreadable"] += asked.count
            return
        self.counts["repaired"] += parsed.is_repaired
        found = [_query_of(item) for item in texts_in(parsed.value, "queries", "query", asked.kind)]
        usable = [query for query in found if query is not None]
        self.counts["no_text"] += len(found) - len(usable)
        self.counts["missing"] += max(0, asked.count - len(found))
        self.counts["too_many"] += max(0, len(usable) - asked.count)
        for query, instruction in usable[: asked.count]:
            yield Draft(
                query=query,
                kind=asked.kind,
                sources=asked.sources,
                positives=asked.positives,
                ids=asked.ids,
                prompt=self.prompts.digest(asked.kind),
                language=asked.language,
                instruction=instruction if _kind(asked.kind).has_instruction else None,
            )


def _kind(name: str) -> QueryKind:
    return QUERY_KINDS.get(name, QUERY_KINDS["question"])


def _choose(shares: Sequence[tuple[str, float]], number: float) -> str:
    """The name in whose share a number from 0 to 1 lies."""
    for name, share in shares:
        number -= share
        if number < 0:
            return name
    return shares[-1][0]


def _query_of(item: Any) -> tuple[str, str | None] | None:
    """The query and the instruction of an element of an answer; None if it has no text."""
    instruction = None
    if isinstance(item, Mapping):
        of_item = {str(name).casefold(): value for name, value in item.items()}
        instruction = of_item.get("instruction")
        names = ("query", "question", "text", *(name for name in of_item if name != "instruction"))
        item = next((of_item[name] for name in names if isinstance(of_item.get(name), str)), None)
    if not isinstance(item, str):
        return None
    query = " ".join(item.split()).strip("\"'\u201c\u201d\u201e ")
    text = " ".join(instruction.split()) if isinstance(instruction, str) else ""
    return (query, text or None) if query else None


def neighbours(block: Sequence[SourceDocument], indices: Sequence[int], world: World) -> dict[int, int]:
    """Another document of the block for each of these: the best of BM25, else one beside it in the same file.

    None for a document that is alone. A collective: rank 0 searches.
    """
    found: dict[int, int] = {}
    with world.fail_together("looking for documents of one neighbourhood"):
        if world.is_main:
            names = [f"{index:09}" for index in range(len(block))]
            texts = [document.text for document in block]
            rankings = bm25_rankings(
                [texts[index][:_NEIGHBOUR_CHARACTERS] for index in indices], Corpus(names, texts), 2
            )
            for index, ranking in zip(indices, rankings, strict=True):
                others = [other for other in ranking if other != index]
                beside = [
                    other
                    for other in (index + 1, index - 1)
                    if 0 <= other < len(block) and block[other].file == block[index].file
                ]
                if chosen := [*others, *beside]:
                    found[index] = chosen[0]
    return world.broadcast(found)


# What becomes no draft, and what the summary calls it.
LOSSES = {
    "alone": "without a second document",
    **{f"no_answer_{reason.name}": reason.value for reason in RefusalReason},
    "cut": "cut at writer.max_new_tokens",
    "unreadable": "answers without JSON",
    "no_text": "without a text",
    "missing": "fewer than asked for",
}
ROWS_FILE, SUMMARY_FILE = "rows.jsonl", "synthesis.json"
_DRAFTS_FILE = ".drafts.jsonl"
_ROUND_TRIP_FOLDER = ".round_trip"


class SynthesisFolder:
    """The output directory.

        OUTPUT_DIR/rows.jsonl        the rows
        OUTPUT_DIR/synthesis.json    figures; written last
        OUTPUT_DIR/report.html       the same figures, with samples
        OUTPUT_DIR/answers/          every answer of a language model, and a log of attempts

    Rows of other options are replaced: what they have cost is in `answers`, which stays.
    """

    def __init__(self, directory: Path, world: World) -> None:
        self.directory, self.world = directory, world
        self.rows, self.summary, self.drafts = (directory / name for name in (ROWS_FILE, SUMMARY_FILE, _DRAFTS_FILE))

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Prepare to write; False if all rows of this identity are there. A collective.

        Raises DataError if the directory has a file of these names that this command has not written.
        """
        is_finished = False
        with self.world.fail_together("opening output_dir"):
            if self.world.is_main:
                make_folder(self.directory)
                found = read_synthesis(self.directory)
                for path in (self.rows, self.directory / REPORT_FILE) if found is None else ():
                    if path.exists():
                        raise DataError(f"{path} exists and was not written by this command: choose another output_dir")
                has_all = found is not None and not found["unanswered"] and self.rows.is_file()
                is_finished = has_all and found is not None and found["identity"] == json.loads(json.dumps(identity))
        return not self.world.broadcast(is_finished)

    def finish(self, drafts: Iterator[Draft], summary: Mapping[str, Any], tally: Tally) -> None:
        """Write the rows, the report and then the summary; on one rank."""
        written = Written()
        with atomic_write(self.rows) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as file:
            rows = (draft.row(summary["model"]) for draft in written.watch(drafts))
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_report(self.directory / REPORT_FILE, summary, LOSSES, tally, written)
        with atomic_write(self.summary) as unfinished:
            unfinished.write_text(json.dumps(summary, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        self.drafts.unlink(missing_ok=True)
        remove_tree(self.directory / _ROUND_TRIP_FOLDER)


def read_synthesis(directory: Path) -> dict[str, Any] | None:
    """The content of synthesis.json; None if there is none. Raises DataError if it is something else."""
    path = directory / SUMMARY_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): choose another output_dir") from None
    if not isinstance(content, dict) or not {"identity", "unanswered"} <= content.keys():
        raise DataError(f"{path} was not written by this command: choose another output_dir")
    return content


class DraftFile:
    """Drafts on disk, in order; only rank 0 writes. The others count what they would have written."""

    def __init__(self, path: Path, world: World) -> None:
        self._path, self._world, self._queries = path, world, list[str]()
        with world.fail_together("opening output_dir"):
            if world.is_main:
                require_own_file(path)
                path.write_bytes(b"")

    @property
    def queries(self) -> list[str]:
        """The query of each draft."""
        return self._queries

    def add(self, drafts: Sequence[Draft]) -> None:
        """Append drafts. A collective, with the same ones on all ranks."""
        self._queries += [draft.query for draft in drafts]
        with self._world.fail_together("writing rows"):
            if self._world.is_main:
                with self._path.open("a", encoding="utf-8", newline="\n") as file:
                    file.writelines(json.dumps(asdict(draft), ensure_ascii=False) + "\n" for draft in drafts)

    def read(self) -> Iterator[Draft]:
        """All drafts; on rank 0."""
        with self._path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield read_record(Draft, json.loads(line))


def synthesize(
    options: "SynthesizeOptions",
    world: World,
    console: Console,
    asker: Asker,
    usage: Callable[[], Mapping[str, Any]],
    judge: Asker | None = None,
) -> Path:
    """Ask for queries of all documents, check them, and write the rows, the figures and the report. A collective.

    Args:
        asker: writes queries; `judge` grades them, by default the same one.
        usage: the requests and tokens that were spent. A collective.

    Returns the file of rows. Raises DataError if no row is left, Stopped if a signal ends it.
    """
    documents = Documents(options.corpus, options.on_error, options.max_documents)
    folder = SynthesisFolder(expand_user(options.output_dir), world)
    identity: dict[str, Any] = {}
    writer: QueryWriter | None = None
    prompts: Prompts | None = None
    with console.phase("reading documents"), world.fail_together("reading documents"):
        num_documents = sum(1 for _ in documents)
        sources = options.queries.examples or []
        examples = read_example_queries(sources, options.window.words)
        prompts = Prompts(options.prompts, list(options.queries.kinds))
        writer = QueryWriter(options, prompts, examples)
        identity = _identity(options, documents, examples, prompts, [asker.name, (judge or asker).name])
    assert writer is not None
    assert prompts is not None
    require_same_documents(identity, world)
    if not folder.begin(identity):
        console.note(f"{options.output_dir} already holds the results of this command: nothing to do")
        return folder.rows
    console.note(_documents_note(documents))
    if documents.skipped:
        console.warn(f"{documents.counts['skipped']:,} skipped, the first: {documents.skipped}")
    drafts = DraftFile(folder.drafts, world)
    tally = Tally()
    refine = _refine(options, prompts, tally, asker, judge or asker)
    num_read = 0
    for block in read_blocks(documents, world):
        asked = writer.requests(block, world)
        requests = [each.request for each in asked]
        if num_read == 0:
            console.note(_estimate_note(asker.estimate(requests), len(block), num_documents, options))
        replies = asker.ask(requests)
        with world.fail_together("reading answers"):
            written = writer.drafts(asked, replies)
        tally.count(written)
        drafts.add(refine(written))
        num_read += len(block)
        if num_documents > len(block):
            console.note(f"{num_read:,} of {num_documents:,} documents: {len(drafts.queries):,} queries so far")
    if documents.digest != identity["corpus"]:
        raise DataError("corpus has changed while it was read: run the same command again")
    kept = _checked_together(drafts, options, tally, [example.query for example in examples], world)
    summary = {
        "rows": int(kept.sum()),
        "documents": dict(documents.counts),
        "asked": writer.num_asked,
        "lost": {name: writer.counts[name] for name in LOSSES if writer.counts[name]},
        "unanswered": tally.unanswered + sum(writer.counts[f"no_answer_{reason.name}"] for reason in RefusalReason),
        "repaired_answers": writer.counts["repaired"],
        "checks": tally.to_json(),
        "model": asker.name,
        "prompts": {kind: prompts.digest(kind) for kind in writer.kinds},
        "usage": dict(usage()),
        "identity": identity,
    }
    with world.fail_together("writing rows"):
        if world.is_main and not kept.any():
            raise DataError(f"no row is left of {writer.num_asked:,} queries that were asked for: {_reasons(summary)}")
        if world.is_main:
            folder.finish(_chosen(drafts, kept), summary, tally)
    if world.is_main:
        print_summary(Page(), summary, folder.rows)
    return folder.rows


def read_blocks(documents: Documents, world: World) -> Iterator[list[SourceDocument]]:
    """The blocks of the documents; if one rank cannot read them, all fail. A collective."""
    blocks = documents.blocks()
    while True:
        block: list[SourceDocument] | None = None
        with world.fail_together("reading documents"):
            block = next(blocks, None)
        if block is None:
            return
        yield block


def require_same_documents(identity: Mapping[str, Any], world: World) -> None:
    """Raise DataError on every rank if a rank has read something else than rank 0. A collective."""
    main = world.broadcast(identity)
    with world.fail_together("comparing the data of all ranks"):
        for name in ("corpus", "examples", "prompts"):
            if main[name] != identity[name]:
                raise DataError(
                    f"{name} has other contents on rank {world.rank} than on rank 0: every node must see the same "
                    "files under the same paths"
                )


def _identity(
    options: "SynthesizeOptions",
    documents: Documents,
    examples: Sequence[ExampleQuery],
    prompts: Prompts,
    models: Sequence[str],
) -> dict[str, Any]:
    """Everything that the rows depend on, as JSON."""
    values = flatten(type(options), to_plain(options))
    names = ("corpus", "prompts", "queries.examples")  # whose content counts
    return {
        **{name: value for name, value in values.items() if is_in_result(name, options) and name not in names},
        "corpus": documents.digest,
        "examples": checksum_of([[each.query, each.document] for each in examples]),
        "prompts": {name: prompts.digest(name) for name in prompts.names},
        "models": list(models),
    }


def _documents_note(documents: Documents) -> str:
    counts = documents.counts
    others = {"duplicates": "duplicates", "empty": "without a text"}
    more = [f"{counts[name]:,} {what}" for name, what in others.items() if counts[name]]
    return f"documents: {counts['documents']:,}" + (f" (besides {' and '.join(more)})" if more else "")


def _estimate_note(first: Estimate, num_read: int, num_documents: int, options: "SynthesizeOptions") -> str:
    """What the queries of all documents will cost, by those of the first ones, and how many requests follow them."""
    blocks = num_documents / num_read
    about = "" if blocks == 1 else "about "
    requests, read, written = (
        round(number * blocks) for number in (first.requests, first.prompt_tokens, first.completion_tokens)
    )
    if not requests:
        return f"requests for queries: all {first.answered:,} are answered already"
    text = f"requests for queries: {about}{requests:,}, which read about {read:,} tokens and write at most {written:,}"
    if first.price:
        text += f", for at most {first.price * blocks:,.2f}"
    num_queries = options.queries.per_document * num_documents
    further = {
        "other words": round(options.paraphrase * num_queries),
        "grades": num_queries if options.checks.judge.min_grade is not None else 0,
        "negatives": num_queries if options.queries.negatives else 0,
    }
    if asked := [f"{count:,} for {what}" for what, count in further.items() if count]:
        text += f"; then up to {' and '.join(asked)}, of about as many tokens each"
    total = requests + sum(further.values())
    over = [
        f"{name}={limit:,}"
        for name, limit, needed in (
            ("max_requests", options.max_requests, total),
            ("max_tokens", options.max_tokens, round((read + written) * total / requests)),
        )
        if limit is not None and needed > limit
    ]
    return text + (f"; {' and '.join(over)} may end them earlier" if over else "")


def _reasons(summary: Mapping[str, Any]) -> str:
    """Why queries became no rows."""
    reasons = [f"{count:,} {LOSSES[name]}" for name, count in summary["lost"].items()]
    reasons += [f"{count:,} {TITLES.get(name, name)}" for name, count in summary["checks"]["rejected"].items()]
    return ", ".join(reasons)


def _refine(
    options: "SynthesizeOptions", prompts: Prompts, tally: Tally, asker: Asker, judge: Asker
) -> Callable[[list[Draft]], list[Draft]]:
    """What the drafts of a block go through: other words, the checks of one draft, a grade, negatives. A collective."""
    checks = DraftChecks(options.checks, tally)

    def refiner(asker: Asker) -> Refiner:
        return Refiner(
            asker=asker,
            prompts=prompts,
            temperature=options.writer.temperature,
            max_new_tokens=options.writer.max_new_tokens,
            seed=options.seed,
            tally=tally,
        )

    def refine(drafts: list[Draft]) -> list[Draft]:
        drafts = checks.passed(drafts)
        if options.paraphrase:
            drafts = checks.passed(refiner(asker).paraphrase(drafts, options.paraphrase))
        if options.checks.judge.min_grade is not None:
            drafts = refiner(judge).judge(drafts, options.checks.judge.min_grade)
        return refiner(asker).add_negatives(drafts, options.queries.negatives) if options.queries.negatives else drafts

    return refine


def _checked_together(
    drafts: DraftFile, options: "SynthesizeOptions", tally: Tally, existing: Sequence[str], world: World
) -> NDArray[np.bool_]:
    """Which drafts pass the checks of all of them. A collective; rank 0 counts the others."""
    kept = _without_duplicates(drafts, options, tally, existing, world)
    return _found(drafts, kept, options, tally, world) if options.checks.round_trip.model else kept


def _without_duplicates(
    drafts: DraftFile, options: "SynthesizeOptions", tally: Tally, existing: Sequence[str], world: World
) -> NDArray[np.bool_]:
    """Which drafts are kept. A collective."""
    duplicates: list[Duplicate | None] = []
    with world.fail_together("looking for duplicates"):
        duplicates = find_duplicates(drafts.queries, options.checks.near_duplicate, existing)
        for draft, duplicate in zip(drafts.read(), duplicates, strict=True) if world.is_main else ():
            if duplicate is not None:
                other = drafts.queries[duplicate.of] if duplicate.of >= 0 else existing[-1 - duplicate.of]
                tally.reject(DUPLICATE if duplicate.similarity == 1.0 else NEAR_DUPLICATE, draft, f"of '{other}'")
    return np.array([duplicate is None for duplicate in duplicates], dtype=bool)


def _chosen(drafts: DraftFile, kept: NDArray[np.bool_]) -> Iterator[Draft]:
    return (draft for draft, is_kept in zip(drafts.read(), kept, strict=True) if is_kept)


def _found(
    drafts: DraftFile, kept: NDArray[np.bool_], options: "SynthesizeOptions", tally: Tally, world: World
) -> NDArray[np.bool_]:
    """Those of the kept drafts that find their document. A collective."""
    round_trip = options.checks.round_trip
    search = FilterOptions(
        model=round_trip.model,
        revision=round_trip.revision,
        corpus=options.corpus,
        output_dir=str(expand_user(options.output_dir) / _ROUND_TRIP_FOLDER),
        timeout=options.timeout,
        seed=options.seed,
    )
    ranks = document_ranks(_chosen(drafts, kept) if world.is_main else (), search)
    for draft, rank in zip(_chosen(drafts, kept), ranks, strict=True) if world.is_main else ():
        if rank > round_trip.keep_rank:
            tally.reject(ROUND_TRIP, draft, f"its document has rank {rank:,}")
    found = kept.copy()
    found[kept] = np.array(ranks, dtype=np.int64) <= round_trip.keep_rank
    return found


def print_summary(page: Page, summary: Mapping[str, Any], rows: Path) -> None:
    """Print what was written, what was thrown away and why, and the next command."""
    checks, usage = summary["checks"], summary["usage"]
    facts = [
        ("documents", f"{summary['documents']['documents']:,}"),
        ("queries", f"{summary['asked']:,} asked for, {checks['written']:,} written, {summary['rows']:,} kept"),
        ("model", summary["model"]),
    ]
    if usage:
        facts.append(("requests", f"{usage['requests']:,}, {usage['tokens']:,} tokens"))
    page.facts([*facts, ("rows", str(rows))])
    if reasons := _reasons(summary):
        page.note(f"thrown away: {reasons}", "yellow")
    if summary["unanswered"]:
        page.note(
            "the same command asks again for what has no answer; a larger max_requests or max_tokens goes on", "yellow"
        )
    page.note("")
    page.note(f"embedtrain filter model=MODEL data=[{rows}] output_dir=DIR")
