"""`torchrun -m embedtrain.mine model=DIR data=[PATH,...] output_dir=DIR`: hard negatives for training rows, over all ranks."""

from typing import TYPE_CHECKING

from embedtrain.cli import enter
from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.loading.command_model import model_of
from embedtrain.mine.options import MineOptions, compose_mine

if TYPE_CHECKING:
    from embedtrain.distributed.world import World
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.mine.teacher import FoundTeacher, Teacher
    from embedtrain.models.source import ModelSource
    from embedtrain.tracking.console import Console


def act(options: MineOptions) -> None:
    """Read the rows, encode all documents, find each row's candidates, choose, write, and tell what was found."""
    from pathlib import Path

    from embedtrain.data.cache.cache import Cache
    from embedtrain.data.cache.cache_dir import cache_place
    from embedtrain.distributed.world import doing, joined_world
    from embedtrain.inference.vector_cache import StoredVectors, model_identity
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.mine.documents import corpus_parts
    from embedtrain.mine.finished import finish
    from embedtrain.mine.identity import identity_of, require_same_data
    from embedtrain.mine.miner import Miner
    from embedtrain.mine.prepared import prepare
    from embedtrain.mine.printing import print_mined
    from embedtrain.mine.sources import read_mined
    from embedtrain.mine.work import Work
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(speaks=world.is_main)
        precision = options.precision or (Precision.bf16 if world.device.type == "cuda" else Precision.fp32)
        # What a user may have got wrong comes first: the models, the rows, the folder.
        with world.together("opening the models"):
            model, teacher = _opened(options)
        place = cache_place(options.cache_dir, Path(options.output_dir) / "cache", world, console.note)
        with world.together("reading rows"), console.counted() as told:
            sources = read_mined(options, model.prompts, Cache(directory=place, told=told))
            corpus = corpus_parts(options.corpus)
        for source in sources:
            console.note(str(source.store.report))
        of_model = model_identity(model, precision, world)
        of_teacher = None if teacher is None else model_identity(teacher.source, precision, world)
        with world.together("looking at corpora"):
            identity = identity_of(options, sources, corpus, of_model, of_teacher)
        require_same_data(identity, world)
        work = Work(Path(options.output_dir), identity, world)
        if not work.begin([source.name for source in sources]):
            console.note(f"{options.output_dir} holds all that this command finds: nothing was done")
            return

        # Before documents are collected: what is wrong with a model shall not leave half of another command's work.
        encoder, judge = _loaded(options, teacher, precision, world, console)
        with console.counted() as told, doing("collecting documents"):
            prepared = prepare(work.prepared, sources, corpus, world, told)
        for note in prepared.notes:
            console.note(note)
        stored = StoredVectors(work.vectors, {**of_model, "dtype": options.index.dtype.value})
        miner = Miner(sources, prepared, encoder, stored, judge, work, options)
        with console.counted() as told:
            miner.mine(told)
        console.note(f"mined {sum(len(source.store) for source in sources):,} rows")
        with doing("writing mined files"):
            summary = finish(miner)
        if world.is_main:
            print_mined(Page(), summary, options)


def _opened(options: MineOptions) -> tuple["ModelSource", "FoundTeacher | None"]:
    """What the directories of the model and of the teacher say."""
    from embedtrain.loading.command_model import OF_MODEL, naming
    from embedtrain.mine.teacher import find_teacher
    from embedtrain.models.source import open_source

    with naming(OF_MODEL):
        model = open_source(model_of(options))
    return model, None if options.teacher is None else find_teacher(options)


def _loaded(
    options: MineOptions, teacher: "FoundTeacher | None", precision: Precision, world: "World", console: "Console"
) -> tuple["SentenceEncoder", "Teacher | None"]:
    """The model that finds candidates, and the teacher that scores them, if there is one."""
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.loading.command_model import OF_MODEL, OF_TEACHER, naming
    from embedtrain.loading.load import load_model
    from embedtrain.mine.teacher import load_teacher

    with naming(OF_MODEL):
        loaded = load_model(model_of(options), ParallelConfig(precision=precision), world, seed=0, trains=False)
    encoder = SentenceEncoder(
        loaded.encoder, loaded.tokenizer, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard
    )
    with naming(OF_TEACHER):
        judge, told = (None, ()) if teacher is None else load_teacher(teacher, options, precision, world)
    for note in (*loaded.notes, *(f"teacher: {note}" for note in told)):
        console.note(note)
    return encoder, judge


if __name__ == "__main__":
    enter(compose_mine, act)
