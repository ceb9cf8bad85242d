"""`python -m embedtrain split data=PATH output_dir=DIR`: hold out queries of training rows as a retrieval set."""

import json
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.config.checks import check_train_sources
from embedtrain.config.command_options import ErrorOptions, OutputOptions, RowsOptions, SeedOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sources
from embedtrain.config.paths import require_output_outside, require_sources
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.utils.files import expand_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embedtrain.commands.split.writing import Split, SplitCounts, SplitSource
    from embedtrain.config.recipe import TrainSource


HELP = """embedtrain split: hold out queries of training rows as a retrieval set

  embedtrain split data=PATH output_dir=DIR [dev=300] [option=value ...]

PATH: whatever training reads; several in brackets; with options as
'{path: PATH, columns: [title,body]}'.
Writes DIR/train.jsonl for data.train, and DIR/dev (corpus, queries,
qrels) for evaluation.sets.

{options: data! output_dir! dev corpus seed on_error cache_dir}"""


class DevCorpus(str, Enum):
    """The documents of the held-out set: those of its rows that no training row contains, or those of all rows.

    `all` has those of a corpus to whose documents the rows refer by id as well.
    """

    held_out = "held_out"
    all = "all"


@dataclass(kw_only=True)
class SplitOptions(SeedOptions, ErrorOptions, OutputOptions, RowsOptions):
    """Options of `python -m embedtrain split`."""

    # queries to hold out, with all rows that share a query or a positive with them
    dev: int = option(300, at_least=1)
    corpus: DevCorpus = DevCorpus.held_out  # all: search among the documents of training rows as well


def compose(arguments: list[str]) -> SplitOptions:
    """The options, checked."""
    require_single_process("split")
    options = compose_command("split", SplitOptions, arguments, HELP)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    check = OptionChecks(options)
    check.require(bool(options.data), "data", "is missing; write data=PATH, a file, folder or Hub data set of rows")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for train.jsonl and dev/")
    check_train_sources(options.data, "data")
    require_output_outside(options.output_dir, options.data)
    return options


# Options that describe where and how the original rows are stored; the written rows need none of them.
_STORAGE_OPTIONS = (
    *("path", "format", "name", "revision", "documents", "documents_revision", "each_file", "subset", "split"),
    *("columns", "score_scale", "where", "backslash_escapes"),
)


def require_paths(options: SplitOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_sources(options.data)


@dataclass(frozen=True)
class SplitFiles:
    """What was written."""

    files: list[Path]  # of training rows, one for each source
    dev: Path  # the held-out queries as an evaluation set
    counts: "SplitCounts"


def run(options: SplitOptions) -> SplitFiles:
    """Read the keys of all rows, choose the held-out groups, write both sides, and print what was written."""
    from embedtrain.commands.split.writing import (
        RowKeys,
        choose_held_out,
        file_names,
        open_sources,
        require_new,
        write_split,
    )

    output_dir = expand_user(options.output_dir)
    sources = open_sources(options.data, options.on_error, options.cache_dir)
    names = file_names(sources)
    require_new(output_dir, names)
    keys = RowKeys()
    for source in sources:
        for texts in source.rows(options.on_error):
            keys.add(texts)
    split = choose_held_out(keys, options.dev, options.seed)
    counts = write_split(
        sources, split, keys, output_dir, names, options.on_error, all_documents=options.corpus is DevCorpus.all
    )
    print_split(sources, split, counts, output_dir, names, options.corpus)
    return SplitFiles([output_dir / name for name in names], output_dir / "dev", counts)


def print_split(
    sources: "Sequence[SplitSource]",
    split: "Split",
    counts: "SplitCounts",
    output_dir: Path,
    names: "Sequence[str]",
    corpus: DevCorpus,
) -> None:
    """Print the sources, both sides, and the command that trains with them."""
    from embedtrain.tracking.pages import Page
    from embedtrain.utils.formatting import format_count

    page = Page()
    for source in sources:
        ignored = f"; not used: {', '.join(source.layout.ignored)}" if source.layout.ignored else ""
        page.note(f"{source.name}: {source.layout.describe()}, {source.num_rows:,} rows{ignored}")
        if source.problems:
            page.note(f"{format_count(len(source.problems), 'bad row')} skipped (the first: {source.problems[0]})")
    dev_queries, train_queries = split.num_queries
    held_out = (
        f"{format_count(dev_queries, 'query', 'queries')} ({format_count(counts.dev_rows, 'row')}), "
        f"{format_count(counts.num_relevant, 'relevant document')}, "
        f"{format_count(counts.num_documents, 'document')} to search"
    )
    training = f"{format_count(train_queries, 'query', 'queries')} ({format_count(sum(counts.train_rows), 'row')})"
    facts = [(f"held out: {output_dir / 'dev'}", held_out)]
    facts.append((f"training: {', '.join(str(output_dir / name) for name in names)}", training))
    page.facts(facts)
    total = dev_queries + train_queries
    if 2 * split.largest_group >= total and split.largest_group > dev_queries:
        page.note(
            f"{split.largest_group:,} of {format_count(total, 'query', 'queries')} are linked by equal texts: all of "
            f"them stay in training, and the held-out queries come from the other {total - split.largest_group:,}",
            "yellow",
        )
    elif split.largest_group > 1:
        page.note(f"{split.largest_group:,} queries are linked by equal texts at most; linked rows are never separated")
    if counts.num_dropped:
        page.note(f"{format_count(counts.num_dropped, 'negative')} of training rows left out that are held-out texts")
    if counts.num_instructions:
        page.note("the instructions of rows are not part of the held-out queries: set query_prompt for the set")
    if corpus is DevCorpus.held_out and counts.num_documents < 20 * dev_queries:
        page.note("few documents make an easy search: corpus=all adds the documents of training rows")
    page.note("")
    page.note(next_command(sources, output_dir, names))


def next_command(sources: "Sequence[SplitSource]", output_dir: Path, names: "Sequence[str]") -> str:
    """The training command that reads both sides."""
    train = [_written(source.source, output_dir / name) for source, name in zip(sources, names, strict=True)]
    dev = output_dir / "dev"
    return f"embedtrain train recipe=NAME 'data.train=[{', '.join(train)}]' 'evaluation.sets=[{dev}]'"


def _written(source: "TrainSource", path: Path) -> str:
    """An element of `data.train`: the path, and the options of the source that still apply."""
    options = {
        option.name: getattr(source, option.name)
        for option in fields(source)
        if option.name not in _STORAGE_OPTIONS and getattr(source, option.name) != option.default
    }
    if not options:
        return str(path)
    written = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in options.items())
    return f"{{path: {path}, {written}}}"
