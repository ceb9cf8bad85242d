"""`python -m embedtrain inspect data=PATH [model=DIR]`, or `recipe=NAME`: what training data holds, as a model sees it.

The exit code is 0 where every row can be used, and 1 where one cannot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.config.checks import check_model, check_recipe
from embedtrain.config.command_line import option_of, quote, quote_value
from embedtrain.config.command_options import (
    InstructionOptions,
    KindOptions,
    ModelOptions,
    PoolingOptions,
    RowsOptions,
    TextOptions,
)
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.kinds import kind_of_files, load_kind
from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sources
from embedtrain.config.recipe import Attention, ModelConfig, Precision, Recipe
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.errors import ConfigError, DataError, HubUnavailable
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import printable

if TYPE_CHECKING:
    from embedtrain.commands.inspect.printing import ShownSource
    from embedtrain.commands.inspect.sources import InspectedData, InspectedSource
    from embedtrain.commands.inspect.texts import Cost, TextStatistics, UntruncatedTokenizer
    from embedtrain.data.cache.cache import Cache
    from embedtrain.data.train_data import TrainData
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.pages import Page

HELP = """embedtrain inspect: what training data holds, as the model will see it

  embedtrain inspect data=PATH [model=DIR] [option=value ...]
  embedtrain inspect recipe=NAME data.train=[PATH,...] [any option of training]
  embedtrain inspect data=PATH pictures=FILE.html

PATH: a file, a folder, a pattern (rows/*.jsonl.gz), a URL, or the id of a Hub
data set; several in brackets; with options as '{path: PATH, columns: [q,a]}'.
The exit code is 0 where every row can be used, and 1 where one cannot.

{options: data! model for_loss examples problems pictures max_length query_prompt}"""


@dataclass(kw_only=True)
class InspectOptions(InstructionOptions, TextOptions, RowsOptions, PoolingOptions, KindOptions, ModelOptions):
    """Options of `python -m embedtrain inspect`."""

    for_loss: str = "infonce"  # the loss to train with: some need scores, classes or embeddings
    examples: int = option(2, at_least=0)  # rows to show of each source
    problems: int = option(10, at_least=0)  # rows that cannot be used, to list for each source
    # path of an HTML page with small copies of up to 60 pictures of each source, their sizes, and refused rows
    pictures: str | None = option(None, in_result=False)


_CONFIG_DIR = ("--config-dir", "-cd")
_DISPLAY_OPTIONS = ("examples", "problems", "pictures")  # apply to `data=` and to a recipe


def compose(arguments: list[str]) -> tuple[Recipe, InspectOptions]:
    """A recipe with the data, model and loss to inspect, and the options, both checked.

    The command line has either options of its own (`data=PATH model=DIR`), or those of a training (`recipe=NAME`,
    `data.train=[...]`) besides `examples`, `problems` and `pictures`.

    Raises:
        ConfigError: as `compose_recipes`; no data, or options of both kinds.
        SystemExit: after `--help` and `--cfg job`.
    """
    require_single_process("inspect")
    training_option = next(filter(_is_training_option, arguments), None)
    if training_option is not None:
        training, display = _split_arguments(arguments, training_option)
        recipe = compose_recipe(training)
        if not any(argument.startswith(_CONFIG_DIR) or option_of(argument) == "recipe" for argument in training):
            recipe.name = recipe.name or "inspect"
        return _check_without_model(recipe), _compose_options(display)
    options = _compose_options([_as_list(argument) for argument in arguments])
    OptionChecks(options).require(
        bool(options.data), "data", "no data; write data=PATH or data=[PATH,...], or recipe=NAME and its options"
    )
    recipe = Recipe(name="inspect", loss=LOSSES[check_loss_name(options.for_loss, "for_loss")]())
    recipe.train.steps = 1
    recipe.data.train = parse_sources(options.data, "data", recipe.loss)
    recipe.data.instruction_format = options.instruction_format
    recipe.data.cache_dir = options.cache_dir
    _check_without_model(recipe)
    recipe.model = _model_options(options)  # rows of a loss are read alike for any kind of model
    return recipe, options


def _model_options(options: InspectOptions) -> ModelConfig:
    """Those of a recipe."""
    kind = load_kind(ModelConfig.kind if options.kind is None else options.kind, "kind")
    has_pooling = options.pooling is None or "pooling" in kind.command_options
    OptionChecks(options).require(has_pooling, "pooling", f"is not for kind={kind.name}; leave it out")
    model: ModelConfig = kind.model_options(
        path=options.model or None,
        revision=options.revision,
        max_length=options.max_length,
        query_prompt=options.query_prompt,
        document_prompt=options.document_prompt,
        trust_remote_code=options.trust_remote_code,
        **({} if options.pooling is None else {"pooling": options.pooling}),
    )
    check_model(replace(model, path=model.path or "none"))
    return model


def _compose_options(arguments: list[str]) -> InspectOptions:
    arguments = [quote_value(argument, "pictures") for argument in arguments]
    options = compose_command("inspect", InspectOptions, arguments, HELP)
    is_directory = options.pictures is not None and Path(options.pictures).is_dir()
    OptionChecks(options).require(not is_directory, "pictures", "is a directory; name a file in it")
    return options


def _check_without_model(recipe: Recipe) -> Recipe:
    """The recipe itself, checked. A model is optional: without one lengths are in characters."""
    has_model = recipe.model.path is not None or recipe.model.config is not None
    check_recipe(recipe if has_model else replace(recipe, model=replace(recipe.model, path="none")))
    return recipe


def _is_training_option(argument: str) -> bool:
    first, *rest = option_of(argument).split(".")
    if argument.startswith(_CONFIG_DIR) or first == "recipe":
        return True
    inspect_options = [field.name for field in fields(InspectOptions)]
    return first in (field.name for field in fields(Recipe)) and (bool(rest) or first not in inspect_options)


def _split_arguments(arguments: list[str], training_option: str) -> tuple[list[str], list[str]]:
    """The arguments of a training, and those of inspect.

    Raises:
        ConfigError: `data=PATH` among them.
    """
    if data := next((argument for argument in arguments if option_of(argument) == "data"), None):
        raise ConfigError(
            f"{data} cannot be combined with {training_option}, an option of a training: write data.train=[PATH,...]"
        )
    display = [argument for argument in arguments if option_of(argument) in _DISPLAY_OPTIONS]
    return [argument for argument in arguments if argument not in display], [
        argument.lstrip("+") for argument in display
    ]


def _as_list(argument: str) -> str:
    """`data=` with a single path in brackets and quotes: a bare path may hold what Hydra's grammar reserves."""
    path = argument.removeprefix("data=")
    if path == argument or not path:
        return argument
    match path[0], path[-1]:
        case ("[", "]"):
            return argument
        case ("{", "}") | ("'", "'") | ('"', '"') if len(path) > 1:
            return f"data=[{path}]"
    return f"data=[{quote(path)}]"


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
    sheet: list[ShownSource] = []
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
        if options.pictures is not None:
            sheet += _shown_source(inspected, statistics[-1], problems, empty, tokenizer)
    _print_whole(page, recipe, inspected_data, statistics, num_empty, tokenizer, cache, of_training=not options.data)
    print_cache_size(page, cache.directory, inspected_data.datasets)
    if options.pictures is not None:
        page.subheading(_write_pictures(options.pictures, sheet))
    if no_tokenizer:
        page.subheading(no_tokenizer)
    skipped = any(store.report.rows.num_skipped for data in inspected_data.datasets for store in data.stores)
    if inspected_data.data is None or skipped:
        raise SystemExit(1)


def _tokenizer(recipe: Recipe) -> tuple["UntruncatedTokenizer | None", Mapping[str, str], str]:
    """The model's tokenizer and prompts, and why there is no tokenizer. No weights are read."""
    from embedtrain.commands.inspect.texts import UntruncatedTokenizer
    from embedtrain.inference.loading.load import model_tokenizer

    model = recipe.model
    if model.path is None and model.config is None:
        prompts = {"query": model.query_prompt or "", "document": model.document_prompt or ""}
        return None, prompts, "lengths are in characters: set model=DIR for lengths in tokens"
    source = _source(model)
    if model.config is not None and model.tokenizer is None:
        note = "lengths are in characters: the vocabulary is trained when the run starts"
        return None, source.prompts, note
    tokenizer = model_tokenizer(source, model.tokenizer, model.tokenizer_revision)
    return UntruncatedTokenizer(tokenizer), source.prompts, ""


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
    from embedtrain.commands.inspect.sources import duplicates_in, summarise_extra_columns

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


def _shown_source(
    inspected: "InspectedSource",
    statistics: "TextStatistics",
    problems: list[str],
    num_empty: int,
    tokenizer: "UntruncatedTokenizer | None",
) -> list["ShownSource"]:
    """The pictures of a source on the page of pictures; nothing if it has none."""
    from embedtrain.commands.inspect.printing import (
        ShownPicture,
        ShownSource,
        num_pictures,
        num_refused,
        picture_table,
    )
    from embedtrain.commands.inspect.texts import drawn_pictures
    from embedtrain.data.sources.pictures import file_of_picture
    from embedtrain.data.sources.resolve import find_parts

    if statistics.pictures is None:
        return []
    parts = {part.name: part for part in find_parts(inspected.source).parts}
    shown = []
    for picture, location, length in drawn_pictures(inspected.store, tokenizer):
        row = parts[location.file].location(location.line)
        size = f"{picture.width} x {picture.height}" + ("" if length is None else f", {length:,} tokens, or patches")
        shown.append(ShownPicture.of(picture, file_of_picture(picture), printable(row), size))
    refused = num_refused(inspected.store.report.rows.num_skipped, num_empty)
    sizes = picture_table(statistics.pictures)
    return [ShownSource(inspected.name, sizes, refused, problems, num_pictures(statistics.pictures), shown)]


def _write_pictures(path: str, sheet: list["ShownSource"]) -> str:
    """Write the page of pictures; returns what happened, in words."""
    from embedtrain.commands.inspect.printing import write_contact_sheet

    if not sheet:
        return "pictures: none in this data"
    note = "Pictures from all over each source, up to 60 different ones; tokens are those of the whole picture."
    try:
        write_contact_sheet(expand_user(path), sheet, note)
    except OSError as error:
        raise DataError(f"pictures={path} cannot be written: {error.strerror or error}") from error
    return f"pictures: {path}"


def _print_whole(
    page: "Page",
    recipe: Recipe,
    inspected_data: "InspectedData",
    statistics: Sequence["TextStatistics"],
    num_empty: Sequence[int],
    tokenizer: "UntruncatedTokenizer | None",
    cache: "Cache",
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
    from embedtrain.commands.inspect.sources import duplicates_in
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
    if of_training and recipe.evaluation.sets:
        _print_overlaps(page, recipe, data, cache)
    if of_training and tokenizer is not None:
        print_costs(page, _costs(recipe, data, tokenizer), recipe.train.chunk_tokens)


def _print_overlaps(page: "Page", recipe: Recipe, data: "TrainData", cache: "Cache") -> None:
    """Texts of evaluation sets that the training data has as well; a set that is not cached is named."""
    from embedtrain.commands.inspect.printing import print_overlaps
    from embedtrain.commands.inspect.sources import overlaps
    from embedtrain.evaluation.sets import read_set, set_name

    sets, missing = [], []
    for config in recipe.evaluation.sets:
        try:
            sets.append(read_set(config, subset=recipe.evaluation.subset, cache=cache).data)
        except HubUnavailable:
            missing.append(set_name(config))
    if sets:
        print_overlaps(page, overlaps(sets, data.stores))
    if missing:
        page.note(f"not compared, because the Hugging Face Hub cannot be reached: {', '.join(missing)}", "bold yellow")


def _costs(recipe: Recipe, data: "TrainData", tokenizer: "UntruncatedTokenizer") -> dict[str, "Cost"]:
    """What batches from all over an epoch cost, by the machine."""
    from embedtrain.commands.inspect.texts import batch_cost
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
    from embedtrain.models.attention import CPU, KERNEL_CAPABILITY
    from embedtrain.models.build import build_encoder
    from embedtrain.models.packing import check_packing

    if recipe.model.attention is Attention.padded:
        return set()
    precision = recipe.parallel.precision
    if precision is Precision.auto:  # of GPUs, and of most CPUs with instructions for it
        precision = Precision.bf16
    encoder = build_encoder(_source(recipe.model))
    return {
        gpu
        for gpu, capability in ((True, KERNEL_CAPABILITY), (False, CPU))
        if check_packing(encoder, precision=precision, capability=capability).padding_reason is None
    }


def _source(model: ModelConfig) -> "ModelSource":
    """The model, whose pooling may be missing, because it is not needed here; one with two towers tells them apart."""
    from embedtrain.formats.hub import resolve_directory
    from embedtrain.formats.source import open_model_source, with_kind_of_files

    if model.path is not None and load_kind(model.kind).has_one_model:
        directory = resolve_directory(model.path, model.revision, "model.path", "model.revision")
        if not kind_of_files(directory)[0].has_one_model:
            model = with_kind_of_files(model)[0]
    return open_model_source(load_kind(model.kind).with_any_pooling(model))
