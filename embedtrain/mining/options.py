"""Options of the commands that search documents for the queries of training rows."""

from dataclasses import dataclass
from typing import Any, TypeVar

from embedtrain.config.checks import check_train_sources
from embedtrain.config.command_options import (
    CorpusOptions,
    EncodeOptions,
    FastPrecisionOptions,
    IndexOptions,
    InstructionOptions,
    OutputOptions,
    RankOptions,
    RowsOptions,
    SeedOptions,
    ShardOptions,
)
from embedtrain.config.evaluation import check_index
from embedtrain.config.kind_settings import check_score_labels
from embedtrain.config.options import LENGTH, option
from embedtrain.config.parsing import parse_corpus
from embedtrain.config.paths import require_models, require_output_outside, require_sources
from embedtrain.config.recipe import TrainSource
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError

Options = TypeVar("Options", bound="RowSearchOptions")


@dataclass(kw_only=True)
class RowSearchOptions(
    RankOptions,
    FastPrecisionOptions,
    ShardOptions,
    IndexOptions,
    InstructionOptions,
    OutputOptions,
    CorpusOptions,
    RowsOptions,
    EncodeOptions,
):
    """The options that `mine` and `filter` have in common."""

    # Bi-encoder or cross-encoder whose scores are used instead of the model's. Those of a cross-encoder are raw, before
    # any sigmoid.
    teacher: str | None = option(None, is_input=True)
    teacher_revision: str | None = option(None, is_revision=True)  # a commit, tag or branch of its Hub repository
    teacher_max_length: int | None = option(
        None, **LENGTH
    )  # tokens, of a pair for a cross-encoder; default: the teacher's
    teacher_pair_template: Any = None  # of a cross-encoder, as model.pair_template
    teacher_score_labels: list[int] | None = None  # of a cross-encoder, as model.score_labels
    # A cross-encoder reads a document that is too long in overlapping windows, of which the best counts.
    teacher_document_windows: bool = False

    # Of a negative that is mined, or a positive that is kept; the teacher's score if there is one.
    min_score: float | None = option(None, finite=True, hint="null for no limit")
    # A column of the corpus, such as pdf of rendered pages: documents with the value of a positive are no negatives.
    exclude_same: str | None = None
    # rows that are searched and written together; an interrupted run resumes after them
    query_batch_size: int = option(4096, within=(1, 8192), in_result=False)


@dataclass(kw_only=True)
class FilterOptions(SeedOptions, RowSearchOptions):
    """Options of `python -m embedtrain filter`."""

    # A positive is kept if at most keep_rank - 1 documents score higher, other positives of its query and documents
    # that equal one not counted. KaLM-Embedding-V2: 50; E5 and nomic: 2, with pool=1000000. Null: any rank.
    keep_rank: int | None = option(50, at_least=1, hint="null for any rank")
    # Documents that each positive is ranked among: those of its part of a random partition into parts of about this
    # size. Null: all documents.
    pool: int | None = option(None, at_least=2, hint="null for all documents")
    # Write every row with the columns `rank` and `score`, which have a number for each positive, and reject none:
    # `where` of a source, such as "rank <= 2", then chooses rows each time they are read.
    annotate: bool = False


def check_teacher_use(options: RowSearchOptions) -> None:
    """Raise a ConfigError for an option of a teacher without one."""
    for name in (
        "teacher_max_length",
        "teacher_revision",
        "teacher_pair_template",
        "teacher_score_labels",
        "teacher_document_windows",
    ):
        has_effect = not getattr(options, name) or options.teacher is not None
        OptionChecks(options).require(has_effect, name, "has no effect without a teacher; write teacher=DIR")


def check_row_search(options: RowSearchOptions) -> None:
    """Check these options; `data` must be a list of sources."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    data = "is missing; write data=[PATH,...], files, folders or Hub data sets of training rows"
    check.require(bool(options.data), "data", data)
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the written rows")
    check.require(options.teacher != "", "teacher", "is empty; write a bi-encoder or cross-encoder, or null for none")
    if options.teacher_score_labels is not None:
        check_score_labels(options.teacher_score_labels, check, "teacher_score_labels")
    check.instruction_format()
    check_index(options.index, "index.", stores_vectors=True)
    options.corpus = parse_corpus(options.corpus)
    check_train_sources(options.data, "data")
    for source in options.data:
        _check_source(source, options.output_dir)


def _check_source(source: TrainSource, output_dir: str) -> None:
    if not source.path:
        raise ConfigError("data: a path is empty; write data=[PATH,...]")
    OptionChecks(source, f"data, {source.path}: ").require(
        source.name is None or (bool(source.name) and "/" not in source.name and not source.name.startswith(".")),
        "name",
        f"becomes the name of a file in {output_dir}; write one without / that does not start with a dot",
    )
    require_output_outside(output_dir, [source])


def require_inputs(options: Options) -> Options:
    """The same options; an error if the models or rows that they name do not exist."""
    require_models(model=options.model, adapter=options.adapter, teacher=options.teacher)
    require_sources(options.data, options.corpus)
    return options
