"""`python -m embedtrain inspect data=PATH [model=DIR]`, or `recipe=NAME`: what training data holds, as a model sees it.

The exit code is 0 where every row can be used, and 1 where one cannot.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from embedtrain.commands.inspect.options import InspectOptions, compose
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import Attention, Precision, Recipe

if TYPE_CHECKING:
    from embedtrain.commands.inspect.costs import Cost
    from embedtrain.commands.inspect.sources import InspectedData, InspectedSource
    from embedtrain.commands.inspect.texts import TextStatistics, UntruncatedTokenizer
    from embedtrain.data.cache.cache import Cache
    from embedtrain.data.train_data import TrainData
    from embedtrain.tracking.pages import Page

__all__ = ["InspectOptions", "compose", "run"]


MAX_DOCUMENTS_SHOWN = 4  # positives of an example, and as many negatives
NUM_MEASURED_BATCHES = 8
# Ranks, what they are, and whether they are GPUs.
MACHINES = ((1, "1 GPU", True), (8, "8 GPUs", True), (8, "8 CPU processes", False))
MANY_ROWS = 200_000  # to count them takes a while


def run(arguments: tuple[Recipe, InspectOptions]) -> None:
    """Read the data as training does, and print what it holds: each source, then all of them."""
    from embedtrain.commands.inspect.printing import print_cache_size, print_unusable
    from embedtrain.commands.inspect.sources import inspect_sources
    from embedtrain.data.cache.cache import Cache, cache_directory
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    recipe, options = arguments
    quiet_libraries()
    console, page = Console(), Page()
    tokenizer, prompts, no_tokenizer = _tokenizer(recipe)
    with console.progress() as note:
        cache = Cache(directory=cache_directory(recipe.data.cache_dir), progress=note)
        inspected_data = inspect_sources(recipe, prompts, cache)
        if tokenizer is not None:
            for data in inspected_data.datasets:
                data.prepare(tokenizer.bound, cache)
    statistics: list[TextStatistics] = []
    num_empty: list[int] = []  # files of each source
    read_for = "for_loss" if options.data else "loss"
    for number, inspected in enumerate(inspected_data.sources):
        if inspected.data is None or inspected.loss is None:
            print_unusable(page, inspected)
            continue
        with console.progress() as note:
            if len(inspected.store) >= MANY_ROWS:
                note(f"counting texts of {inspected.name}", number, len(inspected_data.sources))
            problems, empty = _problems(recipe, inspected, options.problems, cache)
            statistics.append(_measure(inspected, tokenizer))
            num_empty.append(empty)
        _print_source(page, inspected, statistics[-1], problems, empty, read_for)
        _print_examples(page, inspected, tokenizer, options.examples)
    _print_whole(page, recipe, inspected_data, statistics, num_empty, tokenizer, of_training=not options.data)
    print_cache_size(page, cache.directory, inspected_data.datasets)
    if no_tokenizer:
        page.subheading(no_tokenizer)
    skipped = any(store.report.rows.num_skipped for data in inspected_data.datasets for store in data.stores)
    if inspected_data.data is None or skipped:
        raise SystemExit(1)


def _tokenizer(recipe: Recipe) -> tuple["UntruncatedTokenizer | None", Mapping[str, str], str]:
    """The model's tokenizer and prompts, and why there is no tokenizer. No weights are read."""
    from embedtrain.commands.inspect.texts import UntruncatedTokenizer
    from embedtrain.inference.loading.bound_tokenizer import bound_tokenizer
    from embedtrain.models.source import open_model_source
    from embedtrain.models.tokenizer import load_tokenizer

    model = recipe.model
    if model.path is None and model.config is None:
        prompts = {"query": model.query_prompt or "", "document": model.document_prompt or ""}
        return None, prompts, "lengths are in characters: set model=DIR for lengths in tokens"
    # The pooling is not needed here, so it may be missing.
    source = open_model_source(load_kind(model.kind).with_any_pooling(model))
    if model.config is not None and model.tokenizer is None:
        note = "lengths are in characters: the vocabulary is trained when the run starts"
        return None, source.prompts, note
    loaded = load_tokenizer(source, model.tokenizer, model.tokenizer_revision)
    return UntruncatedTokenizer(bound_tokenizer(source, loaded)), source.prompts, ""


def _problems(recipe: Recipe, inspected: "InspectedSource", limit: int, cache: "Cache") -> tuple[list[str], int]:
    """The first invalid rows, and the number of empty files.

    The report of a source has only a few invalid rows; for more the source is read again.
    """
    from embedtrain.commands.inspect.sources import first_bad_rows, num_empty_files
    from embedtrain.config.source_losses import source_requirements

    report = inspected.store.report
    if not report.rows.num_skipped:
        return [], 0
    num_empty = num_empty_files(inspected.source, inspected.store)
    if min(limit, report.rows.num_skipped) <= len(report.problems):
        return report.problems[:limit], num_empty
    assert inspected.loss is not None
    needs = source_requirements(inspected.source, inspected.loss, recipe)
    return first_bad_rows(inspected.source, report.name, needs, limit, cache), num_empty


def _measure(inspected: "InspectedSource", tokenizer: "UntruncatedTokenizer | None") -> "TextStatistics":
    """One source's texts."""
    from embedtrain.commands.inspect.texts import measure

    assert inspected.data is not None
    tokens = None if inspected.data.tokens is None else inspected.data.tokens[inspected.number]
    return measure(inspected.store, tokens, inspected.data.settings[inspected.number].text_format, tokenizer)


def _print_source(
    page: "Page",
    inspected: "InspectedSource",
    statistics: "TextStatistics",
    problems: list[str],
    num_empty: int,
    read_for: str,
) -> None:
    """What one source holds."""
    from embedtrain.commands.inspect.printing import print_duplicates, print_lengths, print_source
    from embedtrain.commands.inspect.rows import duplicates_in, summarise_extra_columns

    print_source(page, inspected, summarise_extra_columns(inspected.store), problems, num_empty, read_for)
    print_lengths(page, statistics)
    print_duplicates(page, duplicates_in(statistics.keys))


def _print_examples(
    page: "Page", inspected: "InspectedSource", tokenizer: "UntruncatedTokenizer | None", count: int
) -> None:
    """Some rows from all over a source, the first among them."""
    from embedtrain.commands.inspect.printing import print_example
    from embedtrain.commands.inspect.texts import shown_texts
    from embedtrain.data.sources.resolve import find_parts

    assert inspected.data is not None
    store, text_format = inspected.store, inspected.data.settings[inspected.number].text_format
    parts = {part.name: part for part in find_parts(inspected.source).parts} if count else {}
    count = min(count, len(store))
    for location in range(count):
        example = store[location * len(store) // count]
        texts = shown_texts(example, text_format, tokenizer, MAX_DOCUMENTS_SHOWN)
        left_out = len(example.texts) - len(texts)
        assert example.location is not None
        place = parts[example.location.file].location(example.location.line)
        print_example(page, place, texts, left_out, example.label)


def _print_whole(
    page: "Page",
    recipe: Recipe,
    inspected_data: "InspectedData",
    statistics: Sequence["TextStatistics"],
    num_empty: Sequence[int],
    tokenizer: "UntruncatedTokenizer | None",
    *,
    of_training: bool,
) -> None:
    """All sources together, and what training on them means where a recipe is inspected."""
    from embedtrain.commands.inspect.printing import (
        print_costs,
        print_duplicates,
        print_lengths,
        print_not_combined,
        print_run,
        print_total,
    )
    from embedtrain.commands.inspect.rows import duplicates_in
    from embedtrain.commands.inspect.texts import join_statistics

    is_several, data = len(inspected_data.sources) > 1, inspected_data.data
    if is_several or of_training:
        page.heading("all of it" if is_several else "training on it")
        if data is None:
            print_not_combined(page, inspected_data)
        else:
            print_total(page, data.stores, num_empty, data.plan.rows_per_source.tolist() if of_training else None)
    if data is None:
        return
    if is_several:
        whole = join_statistics(statistics)
        print_lengths(page, whole)
        print_duplicates(page, duplicates_in(whole.keys))
    if of_training:
        print_run(page, data.plan, recipe.train)
    if of_training and tokenizer is not None:
        print_costs(page, _costs(recipe, data, tokenizer), recipe.train.chunk_tokens)


def _costs(recipe: Recipe, data: "TrainData", tokenizer: "UntruncatedTokenizer") -> dict[str, "Cost"]:
    """What batches from all over an epoch cost, by the machine."""
    from embedtrain.commands.inspect.costs import batch_cost
    from embedtrain.training.rank_batch import pass_overhead

    steps, overhead = data.plan.steps_per_epoch, recipe.train.pass_overhead_tokens
    count = min(NUM_MEASURED_BATCHES, steps)
    batches = [number * steps // count for number in range(count)]

    def cost(ranks: int, on_gpu: bool) -> "Cost":
        tokens = pass_overhead(on_gpu=on_gpu, sharded=ranks > 1) if overhead is None else overhead
        return batch_cost(
            data,
            batches,
            ranks,
            recipe.train.chunk_tokens,
            tokens,
            packed=on_gpu in packing,
            inputs=tokenizer.bound.inputs,
        )

    packing = _packing(recipe)
    return {name: cost(ranks, on_gpu) for ranks, name, on_gpu in MACHINES}


def _packing(recipe: Recipe) -> set[bool]:
    """On which machines, with a GPU or without, the model's texts are packed."""
    from embedtrain.models.attention_kernels import CPU, KERNEL_CAPABILITY
    from embedtrain.models.build import build_encoder
    from embedtrain.models.packing import check_packing
    from embedtrain.models.source import open_model_source

    if recipe.model.attention is Attention.padded:
        return set()
    precision = recipe.parallel.precision
    if precision is Precision.auto:  # of GPUs, and of most CPUs with instructions for it
        precision = Precision.bf16
    source = open_model_source(load_kind(recipe.model.kind).with_any_pooling(recipe.model))
    encoder = build_encoder(source)
    return {
        gpu
        for gpu, capability in ((True, KERNEL_CAPABILITY), (False, CPU))
        if check_packing(encoder, precision=precision, capability=capability).padding_reason is None
    }
