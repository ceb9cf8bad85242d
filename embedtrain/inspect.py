"""`python -m embedtrain.inspect data=PATH [model=DIR]`, or `recipe=NAME`: what training data holds, as a model sees it.

The exit code is 0 where every row can be used, and 1 where one cannot.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from embedtrain.config.compose import compose_inspect
from embedtrain.config.schema import InspectOptions, OnError, Pooling, Recipe
from embedtrain.door import enter
from embedtrain.errors import ConfigError, DataError

if TYPE_CHECKING:  # what imports torch: `--help` is to answer at once
    from embedtrain.config.losses import LossConfig
    from embedtrain.config.needs import Needs
    from embedtrain.config.schema import TrainSource
    from embedtrain.data.batches import TrainData
    from embedtrain.data.inspection.costs import Cost
    from embedtrain.data.inspection.measured import Measured
    from embedtrain.data.inspection.seen import UncutTokenizer
    from embedtrain.data.store.cache import Cache
    from embedtrain.data.store.table import RowStore
    from embedtrain.tracking.page import Page

DOCUMENTS_SHOWN = 4  # positives of an example, and as many negatives
BATCHES_MEASURED = 8
# Ranks, what they are, and whether they are GPUs.
MACHINES = ((1, "1 GPU", True), (8, "8 GPUs", True), (8, "8 CPU processes", False))
MANY_ROWS = 200_000  # to count them takes a while


def read(arguments: list[str]) -> tuple[Recipe, InspectOptions]:
    """The options, in one process."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("inspect looks at data in one process: start it with python, not with torchrun")
    return compose_inspect(arguments)


def act(asked: tuple[Recipe, InspectOptions]) -> None:
    """Read the data as training would, and tell what is in it, source by source and then as a whole."""
    from embedtrain.config.needs import needs_of
    from embedtrain.data.chosen import chosen_sources
    from embedtrain.data.store.cache import Cache, cache_directory
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.inspection import size
    from embedtrain.tracking.page import Page
    from embedtrain.training.model import quiet_libraries

    recipe, options = asked
    quiet_libraries()
    console, page = Console(), Page()
    tokenizer, prompts, no_tokenizer = _tokenizer(recipe)
    with console.counted() as told:
        cache = Cache(directory=cache_directory(recipe.data.cache_dir), keep=recipe.data.cache, told=told)
        sources, _ = chosen_sources(recipe)
        data, losses = _read(recipe, prompts, cache)
        if tokenizer is not None:
            data.prepare(tokenizer.bound, cache)
    measured = []
    for number, (source, loss) in enumerate(zip(sources, losses, strict=True)):
        with console.counted() as told:
            if len(data.stores[number]) >= MANY_ROWS:
                told(f"counting texts of {data.names[number]}", number, len(sources))
            problems = _problems(source, data.stores[number], options.problems, needs_of(loss), cache)
            measured.append(_measure(data, number, tokenizer))
        _print_source(page, source, data, number, measured[number], problems)
        _print_examples(page, data, number, tokenizer, options.examples)
    _print_whole(page, recipe, data, measured, of_training=not options.data)
    page.subheading("kept on disk")
    kept = sum(store.num_bytes for store in data.stores)
    for tokens in data.tokens or []:
        kept += sum(array.nbytes for array in (tokens.offsets, tokens.first, tokens.keys, tokens.values))
    page.facts([("place", str(cache.directory)), ("size", f"{size(kept)} of this data")])
    if no_tokenizer:
        page.subheading(no_tokenizer)
    if any(store.report.num_skipped for store in data.stores):
        raise SystemExit(1)


def _tokenizer(recipe: Recipe) -> tuple["UncutTokenizer | None", Mapping[str, str], str]:
    """The model's tokenizer and prompts; without a tokenizer, why there is none. No weights are read."""
    from dataclasses import replace

    from embedtrain.data.inspection.seen import UncutTokenizer
    from embedtrain.data.tokens import TextTokenizer
    from embedtrain.models.source import open_source
    from embedtrain.models.tokenizer import load_tokenizer, text_length

    model = recipe.model
    if model.path is None and model.config is None:
        prompts = {"query": model.query_prompt or "", "document": model.document_prompt or ""}
        return None, prompts, "lengths are in characters: model=DIR tells them in its tokens"
    # How vectors are pooled does not matter here, so nobody has to say it.
    source = open_source(replace(model, pooling=model.pooling or Pooling.mean))
    if model.config is not None and model.tokenizer is None:
        told = "lengths are in characters: the vocabulary is trained on the data when a run begins"
        return None, source.prompts, told
    loaded = load_tokenizer(source, model.tokenizer)
    return UncutTokenizer(TextTokenizer(loaded, text_length(source, loaded))), source.prompts, ""


def _read(recipe: Recipe, prompts: Mapping[str, str], cache: "Cache") -> "tuple[TrainData, list[LossConfig]]":
    """All rows that can be used, checked; the others counted."""
    from embedtrain.data.chosen import chosen_data

    try:
        return chosen_data(recipe, prompts, cache)  # first as training does, so that it finds what is cached here
    except DataError:
        return chosen_data(recipe, prompts, cache, OnError.skip)


def _problems(source: "TrainSource", store: "RowStore", most: int, needs: "Needs", cache: "Cache") -> list[str]:
    """The first rows that cannot be used; the report has a few, and for more the source is read again."""
    from embedtrain.data.inspection.bad_rows import first_bad_rows

    report = store.report
    if min(most, report.num_skipped) <= len(report.problems):
        return report.problems[:most]
    return first_bad_rows(source, report.name, needs, most, cache)


def _measure(data: "TrainData", number: int, tokenizer: "UncutTokenizer | None") -> "Measured":
    """One source's texts."""
    from embedtrain.data.inspection.measured import measure

    tokens = None if data.tokens is None else data.tokens[number]
    return measure(data.stores[number], tokens, data.given[number], tokenizer)


def _print_source(
    page: "Page", source: "TrainSource", data: "TrainData", number: int, measured: "Measured", problems: list[str]
) -> None:
    """What one source holds."""
    from embedtrain.data.inspection.beside import beside_of
    from embedtrain.data.inspection.duplicates import duplicates_in
    from embedtrain.tracking.inspection import print_duplicates, print_lengths, print_source

    store = data.stores[number]
    print_source(page, source, store, data.given[number], beside_of(store), problems)
    print_lengths(page, measured)
    print_duplicates(page, duplicates_in(measured.keys))


def _print_examples(
    page: "Page", data: "TrainData", number: int, tokenizer: "UncutTokenizer | None", count: int
) -> None:
    """Some rows from all over a source, the first among them."""
    from embedtrain.data.inspection.seen import seen
    from embedtrain.tracking.inspection import print_example

    store = data.stores[number]
    count = min(count, len(store))
    for place in range(count):
        example = store[place * len(store) // count]
        texts = seen(example, data.given[number], tokenizer, DOCUMENTS_SHOWN)
        left_out = 1 + len(example.positives) + len(example.negatives) - len(texts)
        print_example(page, f"{example.file}:{example.line}", texts, left_out, example.label)


def _print_whole(
    page: "Page", recipe: Recipe, data: "TrainData", measured: Sequence["Measured"], *, of_training: bool
) -> None:
    """All sources together, and what training on them means where a recipe is inspected."""
    from embedtrain.data.inspection.duplicates import duplicates_in
    from embedtrain.data.inspection.measured import joined
    from embedtrain.tracking.inspection import print_costs, print_duplicates, print_lengths, print_run, print_total

    several = len(measured) > 1
    if several or of_training:
        page.heading("all of it" if several else "training on it")
        print_total(page, data.stores, data.plan.rows_per_source.tolist() if of_training else None)
    if several:
        whole = joined(measured)
        print_lengths(page, whole)
        print_duplicates(page, duplicates_in(whole.keys))
    if of_training:
        print_run(page, data.plan, recipe.train)
    if of_training and data.tokens is not None:
        print_costs(page, _costs(recipe, data), recipe.train.chunk_tokens)


def _costs(recipe: Recipe, data: "TrainData") -> dict[str, "Cost"]:
    """What batches from all over an epoch cost, by the machine."""
    from embedtrain.data.inspection.costs import cost_of
    from embedtrain.training.batches import cost_of_a_pass

    steps, asked = data.plan.steps_per_epoch, recipe.train.pass_tokens
    count = min(BATCHES_MEASURED, steps)
    batches = [number * steps // count for number in range(count)]

    def cost(ranks: int, on_gpu: bool) -> "Cost":
        passes = cost_of_a_pass(on_gpu=on_gpu, sharded=ranks > 1) if asked is None else asked
        return cost_of(data, batches, ranks, recipe.train.chunk_tokens, passes)

    return {name: cost(ranks, on_gpu) for ranks, name, on_gpu in MACHINES}


if __name__ == "__main__":
    enter(read, act)
