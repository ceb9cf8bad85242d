"""`torchrun -m embedtrain.mine model=DIR data=[PATH,...] output_dir=DIR`: mine hard negatives on all ranks."""

from typing import TYPE_CHECKING

from embedtrain.cli import run_command
from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.loading.command_model import command_model_config
from embedtrain.mine.options import MineOptions, compose_mine

if TYPE_CHECKING:
    from embedtrain.distributed.world import World
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.mine.teacher import Teacher, TeacherSpec
    from embedtrain.models.source import ModelSource
    from embedtrain.tracking.console import Console


def act(options: MineOptions) -> None:
    """Read the rows, encode all documents, find each row's candidates, choose, write, and tell what was found."""
    from pathlib import Path

    from embedtrain.data.cache.cache import Cache, cache_place
    from embedtrain.distributed.world import explain_lost_contact, joined_world
    from embedtrain.inference.vector_cache import VectorCache, model_identity
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.mine.documents import corpus_parts
    from embedtrain.mine.finished import finish
    from embedtrain.mine.identity import mining_identity, require_same_files
    from embedtrain.mine.miner import Miner
    from embedtrain.mine.prepared import prepare
    from embedtrain.mine.printing import print_mined
    from embedtrain.mine.sources import read_mining_sources
    from embedtrain.mine.work import MiningFolder
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        precision = options.precision or (Precision.bf16 if world.device.type == "cuda" else Precision.fp32)
        # What a user may have got wrong comes first: the models, the rows, the folder.
        with world.fail_together("opening the models"):
            model, teacher = _opened(options)
        place = cache_place(options.cache_dir, Path(options.output_dir) / "cache", world, console.note)
        with world.fail_together("reading rows"), console.progress() as progress:
            sources = read_mining_sources(options, model.prompts, Cache(directory=place, progress=progress))
            corpus = corpus_parts(options.corpus)
        for source in sources:
            console.note(str(source.store.report))
        of_model = model_identity(model, precision, world)
        of_teacher = None if teacher is None else model_identity(teacher.source, precision, world)
        with world.fail_together("looking at corpora"):
            identity = mining_identity(options, sources, corpus, of_model, of_teacher)
        require_same_files(identity, world)
        work = MiningFolder(Path(options.output_dir), identity, world)
        if not work.begin([source.name for source in sources]):
            console.note(f"{options.output_dir} holds all that this command finds: nothing was done")
            return

        # Before documents are collected: what is wrong with a model shall not leave half of another command's work.
        encoder, teacher_model = _loaded(options, teacher, precision, world, console)
        with console.progress() as progress, explain_lost_contact("collecting documents"):
            prepared = prepare(work.prepared, sources, corpus, world, progress)
        for note in prepared.notes:
            console.note(note)
        vector_cache = VectorCache(work.vectors, {**of_model, "dtype": options.index.dtype.value})
        miner = Miner(sources, prepared, encoder, vector_cache, teacher_model, work, options)
        with console.progress() as progress:
            miner.mine(progress)
        console.note(f"mined {sum(len(source.store) for source in sources):,} rows")
        with explain_lost_contact("writing mined files"):
            summary = finish(miner)
        if world.is_main:
            print_mined(Page(), summary, options)


def _opened(options: MineOptions) -> tuple["ModelSource", "TeacherSpec | None"]:
    """What the directories of the model and of the teacher say."""
    from embedtrain.loading.command_model import MODEL_OPTION_NAMES, command_option_names
    from embedtrain.mine.teacher import open_teacher
    from embedtrain.models.source import open_model_source

    with command_option_names(MODEL_OPTION_NAMES):
        model = open_model_source(command_model_config(options))
    return model, None if options.teacher is None else open_teacher(options)


def _loaded(
    options: MineOptions, teacher: "TeacherSpec | None", precision: Precision, world: "World", console: "Console"
) -> tuple["SentenceEncoder", "Teacher | None"]:
    """The model that finds candidates, and the teacher that scores them, if there is one."""
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.loading.command_model import MODEL_OPTION_NAMES, TEACHER_OPTION_NAMES, command_option_names
    from embedtrain.loading.load import load_model
    from embedtrain.mine.teacher import load_teacher

    with command_option_names(MODEL_OPTION_NAMES):
        loaded = load_model(
            command_model_config(options), ParallelConfig(precision=precision), world, seed=0, work=None
        )
    encoder = SentenceEncoder(
        loaded.encoder, loaded.tokenizer, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard
    )
    with command_option_names(TEACHER_OPTION_NAMES):
        teacher_model, progress = (None, ()) if teacher is None else load_teacher(teacher, options, precision, world)
    for note in (*loaded.notes, *(f"teacher: {note}" for note in progress)):
        console.note(note)
    return encoder, teacher_model


if __name__ == "__main__":
    run_command(compose_mine, act)
