"""`torchrun -m embedtrain.mine model=DIR data=[PATH,...] output_dir=DIR`: mine hard negatives on all ranks."""

from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.cli import run_command
from embedtrain.config.paths import require_models, require_sources
from embedtrain.config.prompts import prompt_warnings
from embedtrain.config.recipe import Precision
from embedtrain.loading.command_model import command_model_config
from embedtrain.mine.options import MineOptions, compose_mine

if TYPE_CHECKING:  # keeps `--help` free of torch
    from embedtrain.distributed.world import World
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.mine.teacher import Teacher, TeacherSpec
    from embedtrain.tracking.console import Console


def compose(arguments: list[str]) -> MineOptions:
    """The options, checked, with paths that exist."""
    options = compose_mine(arguments)
    require_models(model=options.model, adapter=options.adapter, teacher=options.teacher)
    require_sources(options.data, options.corpus)
    return options


def main(options: MineOptions) -> list[Path]:
    """Read the rows, encode all documents, choose the negatives of each row, write them, and print a summary.

    Returns the files of mined rows, one for each source.
    """
    from embedtrain.data.cache.cache import Cache, writable_cache_directory
    from embedtrain.distributed.world import explain_lost_contact, joined_world
    from embedtrain.inference.vector_cache import VectorCache, model_identity
    from embedtrain.loading.command_model import MODEL_OPTION_NAMES, command_option_names
    from embedtrain.loading.encoder_model import open_encoder_source
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.mine.folder import MiningFolder, mining_identity, require_same_files
    from embedtrain.mine.inputs import prepare_inputs
    from embedtrain.mine.miner import Miner
    from embedtrain.mine.sources import corpus_parts, read_mining_sources
    from embedtrain.mine.stats import print_summary
    from embedtrain.mine.teacher import open_teacher
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        precision = _precision(options, world)

        # User errors are reported first: in the models, the rows, the output directory.
        with world.fail_together("opening the models"):
            with command_option_names(MODEL_OPTION_NAMES):
                model = open_encoder_source(command_model_config(options))[1]
            teacher_spec = None if options.teacher is None else open_teacher(options)
        cache_dir = writable_cache_directory(options.cache_dir, Path(options.output_dir) / "cache", world, console.note)
        with world.fail_together("reading rows"), console.progress() as progress:
            sources = read_mining_sources(options, model.prompts, Cache.of_world(cache_dir, world, progress=progress))
            corpus = corpus_parts(options.corpus)
        for source in sources:
            console.note(str(source.store.report))
        identity_of_model = model_identity(model, precision, world)
        identity_of_teacher = None if teacher_spec is None else model_identity(teacher_spec.source, precision, world)
        with world.fail_together("reading corpora"):
            identity = mining_identity(options, sources, corpus, identity_of_model, identity_of_teacher)
        require_same_files(identity, world)
        folder = MiningFolder(Path(options.output_dir), identity, world)
        mined_files = [folder.output_dir / f"{source.name}.jsonl" for source in sources]
        if not folder.begin([source.name for source in sources]):
            console.note(f"{options.output_dir} already holds the results of this command: nothing to do")
            return mined_files

        # Before documents are collected: an error in a model must not leave partial results of this command behind.
        encoder, teacher = _load_models(options, teacher_spec, precision, world, console)
        with console.progress() as progress, explain_lost_contact("collecting documents"):
            inputs = prepare_inputs(folder.inputs, sources, corpus, world, progress)
        for note in inputs.notes:
            console.note(note)

        vector_cache = VectorCache(folder.vectors, {**identity_of_model, "dtype": options.index.dtype.value})
        miner = Miner(sources, inputs, encoder, vector_cache, teacher, folder, options)
        with console.progress() as progress:
            miner.mine(progress)
        console.note(f"mined {sum(len(source.store) for source in sources):,} rows")
        with explain_lost_contact("writing mined files"):
            summary = miner.finish()
        if world.is_main:
            print_summary(Page(), summary, options)
        return mined_files


def _precision(options: MineOptions, world: "World") -> Precision:
    from embedtrain.distributed.sharding import resolve_precision

    default = Precision.auto if world.device.type == "cuda" else Precision.fp32
    return resolve_precision(options.precision or default, world)


def _load_models(
    options: MineOptions, teacher_spec: "TeacherSpec | None", precision: Precision, world: "World", console: "Console"
) -> tuple["SentenceEncoder", "Teacher | None"]:
    """Load the model that finds candidates, and the teacher that scores them, if there is one."""
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.loading.command_model import TEACHER_OPTION_NAMES, command_option_names
    from embedtrain.loading.encoder_model import load_encoder_model
    from embedtrain.mine.teacher import load_teacher

    console.warn(*prompt_warnings(options))
    with console.phase("loading the model"):
        model = load_encoder_model(command_model_config(options), precision, world)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard)
    teacher: Teacher | None = None
    teacher_notes: tuple[str, ...] = ()
    if teacher_spec is not None:
        with command_option_names(TEACHER_OPTION_NAMES):
            teacher, teacher_notes = load_teacher(teacher_spec, options, precision, world)
    for note in (*model.notes, *(f"teacher: {note}" for note in teacher_notes)):
        console.note(note)
    return encoder, teacher


if __name__ == "__main__":
    run_command(compose, main, launches="embedtrain.mine")
