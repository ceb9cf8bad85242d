"""The command from its documents to the files of its output directory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
from embedtrain.commands.synthesize.prompts import Prompts
from embedtrain.commands.synthesize.report import REPORT_FILE, Written, write_report
from embedtrain.commands.synthesize.types import Asker, Draft, Estimate, RefusalReason
from embedtrain.config.command_line import flatten
from embedtrain.config.compose import to_plain
from embedtrain.config.options import is_in_result
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mining.options import FilterOptions
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
    from embedtrain.commands.synthesize import SynthesizeOptions

from embedtrain.commands.synthesize.writing import (
    Documents,
    ExampleQuery,
    QueryWriter,
    SourceDocument,
    read_example_queries,
)

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
