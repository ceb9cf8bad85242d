"""The model card: description, usage, evaluation results and recipe of a model, with metadata for the Hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from embedtrain import __version__
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.checks import is_repository_name
from embedtrain.config.evaluation import TRAINED
from embedtrain.config.kinds import Kind, load_kind
from embedtrain.config.recipe import LOGIT_SCORE, ONNX
from embedtrain.data.sources.parts import may_be_hub_id
from embedtrain.formats.peft import TaskAdapter
from embedtrain.formats.sentence_transformers import TASKS_FOLDER
from embedtrain.models.adapters import describe_kind
from embedtrain.report.changes import CONFIDENCE, Change, changes_since_start
from embedtrain.tracking.metrics import DatasetInfo, datasets_at, metrics_at
from embedtrain.tracking.pages import vector_lines, without_forms
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import format_count

Metrics = Mapping[str, Mapping[str, float]]

# Task types of the Hub by kind of evaluation set, those that sentence-transformers uses in its cards.
_TASKS = {
    "retrieval": "information-retrieval",
    "reranking": "reranking",
    "sts": "semantic-similarity",
    "pair_classification": "binary-classification",
    "bitext": "translation",
    "classification": "classification",
    "clustering": "clustering",
}
# Groups of a recipe that describe where it ran, not what it trained.
_LEFT_OUT = ("output_dir", "tracking")
# Groups of a recipe that describe an export and its evaluation, not the training of the weights.
OF_EXPORT = ("evaluation", "export")
_IS_PATH = re.compile(r"(/|~|\.\.?/|[A-Za-z]:\\)|[^\s{}]*/[^\s{}]*[*?\[]")
_HOMES = ("home", "Users")  # folders of home directories
UNNAMED = "path/of/this/directory"  # in the code of a card
LOGIT_SCORE_USAGE = [
    "`logit_score` is the same model as a causal language model, whose score is the logit of a token, or the "
    "difference of two, for sentence-transformers 6 (`LogitScore`).",
    "",
]


def model_card(
    recipe: Mapping[str, Any],
    run_dir: Path,
    *,
    step: int,
    dimension: int,
    max_length: int,
    prompts: Mapping[str, str],
    formats: Sequence[str] = (),
    name: str | None = None,
) -> str:
    """README.md of a model directory.

    The evaluation results are those of `step` in `run_dir`; `prompts` are those of queries and documents; `name` is
    the id of the Hub repository to which the model is uploaded.
    """
    path, kind = recipe["model"].get("path"), _kind(recipe)
    base, shown = hub_id(path), name or UNNAMED
    # Of the exported weights only.
    metrics = {name: row for name, row in metrics_at(run_dir, step).items() if not name.endswith(TRAINED)}
    datasets, writers = datasets_at(run_dir, step), RunDirectory(run_dir).query_writers()
    before = metrics_at(run_dir, 0) if step else {}
    main_metrics = {set_name: next(iter(row)) for set_name, row in metrics.items() if set_name in before and row}
    changes = changes_since_start(run_dir, step, main_metrics) if main_metrics else {}
    return "\n".join(
        [
            "---",
            _metadata(recipe, base, metrics, datasets, onnx=ONNX in formats, is_synthetic=bool(writers)),
            "---",
            f"# {recipe['name']}",
            "",
            f"{description(kind, dimension, max_length)}, "
            f"{_origin(path, base)} with embedtrain {__version__}; weights of step {step}.",
            "",
            *kind.files.usage(shown, prompts, RunDirectory(run_dir).architecture),
            *kind.files.graph_usage() * (ONNX in formats),
            *LOGIT_SCORE_USAGE * (LOGIT_SCORE in formats),
            *_evaluation(without_forms(metrics, datasets), datasets, before, changes),
            *vector_lines(metrics, datasets),
            *_synthetic_data(writers),
            "## Recipe",
            "",
            "Options that are not set, and the folders of local files, are left out.",
            "",
            "```yaml",
            yaml.safe_dump(_published(recipe), sort_keys=False, allow_unicode=True).strip(),
            "```",
            "",
        ]
    )


def description(kind: Kind, dimension: int, max_length: int) -> str:
    """What a card calls a model, without a full stop."""
    return kind.files.description.format(dimension=dimension, max_length=max_length)


def card_header(kind: Kind, bases: str | Sequence[str] | None, *tags: str, relation: str | None = None) -> str:
    """The YAML of a card without results, whose keys the Hub defines; `bases` are the ids of base models."""
    values = {
        "base_model": bases or None,
        "base_model_relation": relation if bases else None,
        "library_name": "sentence-transformers",
        "pipeline_tag": kind.files.task,
        "tags": ["sentence-transformers", *kind.files.tags, *tags],
    }
    content = {key: value for key, value in values.items() if value is not None}
    return f"---\n{yaml.safe_dump(content, sort_keys=False).strip()}\n---"


def recipe_of_weights(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe for the card of a checkpoint's weights: `saved` in it, with the export and its evaluation of `now`."""
    return {**now, **{group: options for group, options in saved.items() if group not in OF_EXPORT}}


def _origin(path: str | None, base: str | None) -> str:
    """What was trained; of a local model the last two parts of its path, because the last is often `model`."""
    if path is None:
        return "trained from random weights"
    if base is not None:
        return f"fine-tuned from `{base}`"
    local = Path(path)
    names = [part for part in local.parts if part not in (local.anchor, "..", "~")][-2:]
    if local.parent == expand_user("~") or local.parent.parent.name in _HOMES:
        names = names[-1:]  # the other is the name of a user
    return f"fine-tuned from a local model, `{'/'.join(names)}`," if names else "fine-tuned from a local model"


def _metadata(
    recipe: Mapping[str, Any],
    base: str | None,
    metrics: Metrics,
    datasets: Mapping[str, DatasetInfo],
    *,
    onnx: bool,
    is_synthetic: bool,
) -> str:
    """The YAML header, whose keys the Hub defines."""
    from huggingface_hub import EvalResult, ModelCardData

    sources = [hub_id(source["path"]) for source in recipe["data"]["train"]]
    hub_sets = {item.get("name") or Path(item["path"]).name: item["path"] for item in recipe["evaluation"]["sets"]}
    results = [
        EvalResult(
            task_type=_TASKS[datasets[set_name].kind],
            dataset_type=hub_id(hub_sets.get(set_name)) or set_name,
            dataset_name=f"{set_name} (subset)" if datasets[set_name].subset else set_name,
            metric_type=metric,
            metric_value=round(value, 6),
        )
        for set_name, values in metrics.items()
        if set_name in datasets and datasets[set_name].kind in _TASKS
        for metric, value in values.items()
    ]
    kind = _kind(recipe)
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,
        datasets=[source for source in dict.fromkeys(sources) if source] or None,
        language=recipe["export"].get("language") or None,
        license=recipe["export"].get("license"),
        library_name="sentence-transformers",
        pipeline_tag=kind.files.task,
        tags=["sentence-transformers", *kind.files.tags, "embedtrain"] + [ONNX] * onnx + ["synthetic"] * is_synthetic,
        model_name=recipe["name"] if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _kind(recipe: Mapping[str, Any]) -> Kind:
    return load_kind(recipe["model"].get("kind") or "dense")


def _evaluation(
    metrics: Metrics, datasets: Mapping[str, DatasetInfo], before: Metrics, changes: Mapping[str, Change]
) -> list[str]:
    """A table of the sets by kind; of the main metric, which is the first, also the value before training."""
    if not metrics:
        return []
    names = list(dict.fromkeys(metric for row in metrics.values() for metric in row))
    heads = ["set", "kind", "size", *names, *(["main metric before training", "change"] if before else [])]
    lines = ["## Evaluation", "", f"| {' | '.join(heads)} |", "| --- | --- | --- |" + " ---: |" * (len(heads) - 3)]
    shown: list[Change] = []
    for name, row in metrics.items():
        info = datasets.get(name)
        cells = [name, info.label if info else "", info.size if info else ""]
        cells += [f"{row[metric]:.4f}" if metric in row else "" for metric in names]
        if before:
            main = next(iter(row), "")
            first = before.get(name, {}).get(main)
            if first is None:
                cells += ["", ""]
            else:
                shown.append(changes.get(name) or Change.of(first, row[main], None))
                cells += [f"{first:.4f} ({main})", _change(shown[-1])]
        lines.append(f"| {' | '.join(cells)} |")
    if any(info.subset for info in datasets.values()):
        lines += ["", "Metrics of a subset are not comparable with those of the whole set."]
    computed = list(dict.fromkeys(info.precision for info in datasets.values() if info.precision))
    if computed:
        lines += ["", f"The model computed in {' and '.join(computed)}; in another precision values differ slightly."]
    if any(change.interval for change in shown):
        lines += [
            "",
            f"In parentheses is the {CONFIDENCE:.0%} confidence interval of the change, by a paired bootstrap over "
            "queries. There is no clear change if it contains 0: other queries could show the opposite.",
        ]
    if any(not change.direction for change in shown):
        lines += ["", "A change without an interval may be noise."]
    return [*lines, ""]


def _synthetic_data(writers: Mapping[str, int]) -> list[str]:
    """Which queries of the training data no person has written."""
    if not writers:
        return []
    counts = [f"{count:,} by `{name.replace('`', '')}`" for name, count in writers.items()]
    text = f"Language models wrote {format_count(sum(writers.values()), 'query', 'queries')} of the training data: "
    return ["## Synthetic data", "", f"{text}{', '.join(counts)}.", ""]


def _change(change: Change) -> str:
    interval = f" ({change.interval})" if change.interval else ""
    return f"{change.text}{interval}" + (", no clear change" if interval and change.direction == "noise" else "")


def hub_id(path: str | None) -> str | None:
    """The path if it is the id of a repository; the Hub rejects cards with other values."""
    is_id = path is not None and may_be_hub_id(path) and is_repository_name(path) and not Path(path).exists()
    return path if is_id else None


def _published(recipe: Mapping[str, Any]) -> Any:
    """The recipe without nulls, empty groups and local paths, of which the last part stays."""

    def publish(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: item for key, item in ((k, publish(v)) for k, v in value.items()) if item not in (None, {})}
        if isinstance(value, list):
            return [publish(item) for item in value]
        if isinstance(value, str) and "/" in value and (_IS_PATH.match(value) or _exists(value)):
            return Path(value).name
        return value

    return publish({key: value for key, value in recipe.items() if key not in _LEFT_OUT})


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a text that is too long for a path
        return False


def tasks_card(
    adapters: Sequence[TaskAdapter], *, title: str, name: str, base: str | None, dimension: int, max_length: int
) -> str:
    """README.md of the directory; `name` is the Hub id or the path that its code opens, `base` the base model's id."""
    kind = adapters[0].checkpoint.base.kind
    tasks = ", ".join(f'"{adapter.task}"' for adapter in adapters)
    first = adapters[0].task
    rows = [
        f"| {a.task} | `{a.folder}` | {describe_kind(a.checkpoint.files.config)} | "
        f"{getattr(a.checkpoint.files.config, 'r', '')} | {a.description} | "
        + " | ".join(_prompt_cell(a.prompts.get(role, "")) for role in ("query", "document"))
        + " |"
        for a in adapters
    ]
    return "\n".join([
        card_header(kind, base, "peft", "lora", "embedtrain", relation="adapter"),
        f"# {title}",
        "",
        f"{description(kind, dimension, max_length)}: one base model"
        f"{f', `{base}`,' if base else ''} and an adapter for each of {len(adapters)} tasks.",
        "",
        "| task | folder | type | rank | trained by | prompt of queries | prompt of documents |",
        "| --- | --- | --- | ---: | --- | --- | --- |",
        *rows,
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{name}")',
        f"for task in [{tasks}]:",
        f'    folder = {{"subfolder": f"{TASKS_FOLDER}/{{task}}"}}',
        f'    model.load_adapter("{name}", adapter_name=task, adapter_kwargs=folder)',
        f'model.set_adapter("{first}")',
        f'queries = model.encode(["a question"], prompt_name="{first}_query")',
        f'documents = model.encode(["a text that answers it"], prompt_name="{first}_document")',
        "print(model.similarity(queries, documents))",
        "```",
        "",
        "Without an adapter, the directory is the base model. PEFT loads a folder with "
        "`PeftModel.from_pretrained(base, FOLDER)`.",
        "",
    ])  # fmt: skip


def _prompt_cell(prompt: str) -> str:
    return "`` " + repr(prompt).replace("|", "\\|") + " ``" if prompt else ""
