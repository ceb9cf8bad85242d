"""What `mine` and `filter` do before they search: read the rows, load the models, and collect the documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from embedtrain.config.checks import prompt_warnings
from embedtrain.config.recipe import Precision
from embedtrain.config.validation import model_options_named
from embedtrain.data.cache.cache import Cache, writable_cache_directory
from embedtrain.data.sources.parts import SourcePart
from embedtrain.distributed.sharding import resolve_precision
from embedtrain.distributed.world import World, explain_lost_contact, joined_world
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.loading.command_model import (
    MODEL_OPTION_NAMES,
    TEACHER_OPTION_NAMES,
    command_model_config,
    load_encoder_model,
    open_encoder_source,
)
from embedtrain.inference.loading.load import quiet_libraries
from embedtrain.inference.vector_cache import VectorCache, model_identity
from embedtrain.mining.folder import MiningFolder, mining_identity, require_same_files
from embedtrain.mining.inputs import MiningInputs, prepare_inputs
from embedtrain.mining.options import RowSearchOptions
from embedtrain.mining.pool import (
    DocumentFormat,
    IntArray,
    MiningSource,
    corpus_parts,
    know_corpus_pictures,
    read_mining_sources,
)
from embedtrain.mining.teacher import Teacher, TeacherSpec, load_teacher, open_teacher
from embedtrain.tracking.console import Console
from embedtrain.tracking.pages import Page

Options = TypeVar("Options", bound=RowSearchOptions)
Finish = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class RowSearch:
    """The rows, the documents to search for their queries, and the models that compare them."""

    sources: list[MiningSource]
    inputs: MiningInputs
    encoder: SentenceEncoder  # of the model that searches
    vector_cache: VectorCache  # of the model's document vectors
    teacher: Teacher | None  # provides the scores; None: the model does
    folder: MiningFolder
    options: RowSearchOptions

    def index(
        self, document_format: DocumentFormat, progress: ProgressCallback, documents: IntArray | None = None
    ) -> ShardedIndex:
        """An index of all documents in this format, or of those with these numbers. A collective."""
        texts = self.inputs.pool.formatted(document_format, documents)
        index = ShardedIndex(first_added_order(len(texts)), self.encoder.world, self.options.index, self.encoder.score)
        with self.encoder.report_progress(progress):
            index.add_texts(
                self.encoder,
                texts,
                max_length=document_format.max_length,
                vector_cache=self.vector_cache,
                existing_prompt=document_format.before,
            )
        return index


@dataclass(frozen=True)
class _Opened:
    sources: list[MiningSource]
    corpus: list[SourcePart]
    teacher: TeacherSpec | None
    precision: Precision
    identity_of_model: dict[str, Any]
    identity_of_teacher: dict[str, Any] | None


def run_row_search(
    options: Options,
    search_rows: Callable[[RowSearch, Console], Finish],
    print_summary: Callable[[Page, Mapping[str, Any], Options], None],
    *,
    rows: str,
    temporary: str,
) -> list[Path]:
    """The whole of `mine` and `filter`. Returns the files of the written rows, one for each source.

    Args:
        search_rows: searches, and returns what writes the rows and returns their summary.
        print_summary: prints it on rank 0.
        rows, temporary: as in `MiningFolder`.
    """
    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        folder, search = _start_row_search(options, world, console, rows=rows, temporary=temporary)
        if search is None:
            return folder.written_files()
        finish = search_rows(search, console)
        with explain_lost_contact(f"writing {rows} files"):
            summary = finish()
        if world.is_main:
            print_summary(Page(), summary, options)
        return folder.written_files()


def _start_row_search(
    options: RowSearchOptions, world: World, console: Console, *, rows: str, temporary: str
) -> tuple[MiningFolder, RowSearch | None]:
    """Everything but the search itself; None if the output directory holds all results already. A collective.

    `rows` and `temporary` are those of `MiningFolder`. Raises ConfigError, ModelError or DataError for what the user
    wrote, before documents are encoded.
    """
    opened, identity = _open(options, world, console)
    folder = MiningFolder(Path(options.output_dir), identity, world, rows=rows, temporary=temporary)
    if not folder.begin([source.name for source in opened.sources]):
        console.note(f"{options.output_dir} already holds the results of this command: nothing to do")
        return folder, None
    # Before documents are collected: an error in a model must not leave partial results of this command behind.
    encoder, teacher = _load_models(options, opened, world, console)
    with console.progress() as progress, explain_lost_contact("collecting documents"):
        inputs = prepare_inputs(folder.inputs, opened.sources, opened.corpus, world, progress, options.exclude_same)
    for note in inputs.notes:
        console.note(note)
    vector_cache = VectorCache(folder.vectors, {**opened.identity_of_model, "dtype": options.index.identity})
    return folder, RowSearch(opened.sources, inputs, encoder, vector_cache, teacher, folder, options)


def _open(options: RowSearchOptions, world: World, console: Console) -> tuple[_Opened, dict[str, Any]]:
    """Read the models' directories and the rows; also returns the identity of the results."""
    default = Precision.auto if world.device.type == "cuda" else Precision.fp32
    precision = resolve_precision(options.precision or default, world)
    with world.fail_together("opening the models"):
        with model_options_named(MODEL_OPTION_NAMES):
            model = open_encoder_source(command_model_config(options))[1]
        teacher = None if options.teacher is None else open_teacher(options)
    cache_dir = writable_cache_directory(options.cache_dir, Path(options.output_dir) / "cache", world, console.note)
    with world.fail_together("reading rows"), console.progress() as progress:
        cache = Cache.of_world(cache_dir, world, progress=progress)
        sources = read_mining_sources(options, model.prompts, cache)
        corpus = corpus_parts(options.corpus)
        know_corpus_pictures(corpus, cache)
    for source in sources:
        console.note(str(source.store.report))
        console.warn(*source.store.report.warnings())
    identity_of_model = model_identity(model, precision, world)
    identity_of_teacher = None if teacher is None else model_identity(teacher.source, precision, world)
    with world.fail_together("reading corpora"):
        identity = mining_identity(options, sources, corpus, identity_of_model, identity_of_teacher)
    require_same_files(identity, world)
    return _Opened(sources, corpus, teacher, precision, identity_of_model, identity_of_teacher), identity


def _load_models(
    options: RowSearchOptions, opened: _Opened, world: World, console: Console
) -> tuple[SentenceEncoder, Teacher | None]:
    """Load the model that searches, and the teacher that scores, if there is one."""
    console.warn(*prompt_warnings(options))
    with console.phase("loading the model"):
        model = load_encoder_model(command_model_config(options), opened.precision, world)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard)
    teacher: Teacher | None = None
    teacher_notes: tuple[str, ...] = ()
    if opened.teacher is not None:
        with model_options_named(TEACHER_OPTION_NAMES):
            teacher, teacher_notes = load_teacher(
                opened.teacher, options, opened.precision, opened.identity_of_teacher or {}, world
            )
    for note in (*model.notes, *(f"teacher: {note}" for note in teacher_notes)):
        console.note(note)
    return encoder, teacher
