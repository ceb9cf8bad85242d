"""The model card: description, usage, evaluation results and recipe of a model, with metadata for the Hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from embedtrain import __version__
from embedtrain.checkpoint.export.cross_encoder import renders_pairs
from embedtrain.checkpoint.export.late_interaction import pylate_usage
from embedtrain.checkpoint.export.sparse import usage_of_words
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.checks import is_repository_name
from embedtrain.config.recipe import LOGIT_SCORE, ONNX, ModelKind
from embedtrain.data.sources.parts import may_be_hub_id
from embedtrain.tracking.metrics import DatasetInfo, datasets_at, metrics_at
from embedtrain.tracking.report.bootstrap import CONFIDENCE
from embedtrain.tracking.report.changes import Change
from embedtrain.tracking.report.outcome import changes_since_start
from embedtrain.tracking.vector_table import vector_lines, without_forms

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
# What the card calls a model.
_KINDS = {
    ModelKind.dense: "A text-embedding model with {dimension} dimensions for texts of up to {max_length} tokens",
    ModelKind.cross_encoder: (
        "A reranker: a cross-encoder that scores pairs of a query and a document of up to {max_length} tokens together"
    ),
    ModelKind.late_interaction: (
        "A late-interaction model (ColBERT): a vector of {dimension} dimensions for each token of a text of up to "
        "{max_length} tokens, and the sum of the largest similarities of a query's tokens as score"
    ),
    ModelKind.m3: (
        "A model of three representations of a text of up to {max_length} tokens, in the manner of BGE-M3: a vector of "
        "{dimension} dimensions, a weight of each token, and a vector of each token"
    ),
    ModelKind.sparse: (
        "A learned sparse model (SPLADE): weights of the {dimension} words of a vocabulary, most of them 0, for texts "
        "of up to {max_length} tokens"
    ),
}
_TAGS = {
    ModelKind.dense: ["sentence-similarity", "feature-extraction"],
    ModelKind.cross_encoder: ["cross-encoder", "reranker"],
    ModelKind.sparse: ["sparse-encoder", "splade", "sparse", "feature-extraction"],
    ModelKind.late_interaction: ["multi-vector", "ColBERT", "late-interaction", "feature-extraction"],
    ModelKind.m3: ["sentence-similarity", "feature-extraction", "multi-vector", "sparse", "bge-m3"],
}
_PIPELINES = {ModelKind.dense: "sentence-similarity", ModelKind.cross_encoder: "text-ranking"}
# Groups of a recipe that describe where it ran, not what it trained.
_LEFT_OUT = ("output_dir", "tracking")
_IS_PATH = re.compile(r"(/|~|\.\.?/|[A-Za-z]:\\)|[^\s{}]*/[^\s{}]*[*?\[]")
_HOMES = ("home", "Users")  # folders of home directories
_LOGIT_SCORE_USAGE = [
    "`logit_score` is the same model as a causal language model, whose score is the logit of a token, or the "
    "difference of two, for sentence-transformers 6 (`LogitScore`).",
    "",
]
_MAX_PROMPT = 60  # characters in the table of prompts


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
    usage = {
        ModelKind.cross_encoder: _usage_of_scores,
        ModelKind.late_interaction: _usage_of_token_vectors,
        ModelKind.m3: _usage_of_m3,
        ModelKind.sparse: usage_of_words,
    }
    base, shown = _hub_id(path), name or "path/of/this/directory"
    metrics, datasets = metrics_at(run_dir, step), datasets_at(run_dir, step)
    before = metrics_at(run_dir, 0) if step else {}
    main_metrics = {set_name: next(iter(row)) for set_name, row in metrics.items() if set_name in before and row}
    changes = changes_since_start(run_dir, step, main_metrics) if main_metrics else {}
    return "\n".join(
        [
            "---",
            _metadata(recipe, base, metrics, datasets, onnx=ONNX in formats),
            "---",
            f"# {recipe['name']}",
            "",
            f"{_KINDS[kind].format(dimension=dimension, max_length=max_length)}, "
            f"{_origin(path, base)} with embedtrain {__version__}; weights of step {step}.",
            "",
            *usage.get(kind, _usage)(shown, prompts, run_dir),
            *_graph_usage(scores_pairs=kind is ModelKind.cross_encoder) * (ONNX in formats),
            *_LOGIT_SCORE_USAGE * (LOGIT_SCORE in formats),
            *_evaluation(without_forms(metrics, datasets), datasets, before, changes),
            *vector_lines(metrics, datasets),
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


def _origin(path: str | None, base: str | None) -> str:
    """What was trained; of a local model the last two parts of its path, because the last is often `model`."""
    if path is None:
        return "trained from random weights"
    if base is not None:
        return f"fine-tuned from `{base}`"
    local = Path(path)
    names = [part for part in local.parts if part not in (local.anchor, "..", "~")][-2:]
    if local.parent == Path.home() or local.parent.parent.name in _HOMES:
        names = names[-1:]  # the other is the name of a user
    return f"fine-tuned from a local model, `{'/'.join(names)}`," if names else "fine-tuned from a local model"


def _metadata(
    recipe: Mapping[str, Any], base: str | None, metrics: Metrics, datasets: Mapping[str, DatasetInfo], *, onnx: bool
) -> str:
    """The YAML header, whose keys the Hub defines."""
    from huggingface_hub import EvalResult, ModelCardData

    sources = [_hub_id(source["path"]) for source in recipe["data"]["train"]]
    hub_sets = {item.get("name") or Path(item["path"]).name: item["path"] for item in recipe["evaluation"]["sets"]}
    results = [
        EvalResult(
            task_type=_TASKS[datasets[set_name].kind],
            dataset_type=_hub_id(hub_sets.get(set_name)) or set_name,
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
        pipeline_tag=_PIPELINES.get(kind, "feature-extraction"),
        tags=["sentence-transformers", *_TAGS[kind], "embedtrain"] + [ONNX] * onnx,
        model_name=recipe["name"] if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _usage_of_scores(name: str, prompts: Mapping[str, str], run_dir: Path) -> list[str]:
    texts = [f"{kind} with {_code(text)}" for kind, text in prompts.items() if text]
    rest = "the library does not prepend it."
    note = f"Begin every {', and every '.join(texts)}: {rest}" if texts else ""
    if renders_pairs(RunDirectory(run_dir).architecture):
        note = (
            "sentence-transformers 6 formats pairs with `chat_template.jinja`; its argument `prompt` is an instruction "
            "for the query. The scores of other software, and of older versions, are only right for texts that are "
            "formatted as the template does."
        )
    return [
        "```python",
        "from sentence_transformers import CrossEncoder",
        "",
        f'model = CrossEncoder("{name}")',
        'scores = model.predict([("a question", "a text that answers it"), ("a question", "another text")])',
        'ranking = model.rank("a question", ["a text that answers it", "another text"])',
        "```",
        "",
        *([note, ""] if note else []),
    ]


def _graph_usage(*, scores_pairs: bool) -> list[str]:
    what = "the tokens of pairs to `logits`, the scores before the activation"
    what = what if scores_pairs else "token ids to `last_hidden_state`"
    return [
        f"`onnx/model.onnx` is the same model in fp32, from {what}, for onnxruntime, or for sentence-transformers and "
        'optimum with `backend="onnx"`.',
        "",
    ]


def _usage_of_m3(name: str, prompts: Mapping[str, str], run_dir: Path) -> list[str]:
    return [
        "sentence-transformers computes the vector of a text, FlagEmbedding all three representations:",
        "",
        *_usage(name, prompts, run_dir),
        "```python",
        "from FlagEmbedding import BGEM3FlagModel",
        "",
        f'model = BGEM3FlagModel("{name}")',
        'model.encode(["a text"], return_dense=True, return_sparse=True, return_colbert_vecs=True)',
        "```",
        "",
    ]


def _usage_of_token_vectors(name: str, prompts: Mapping[str, str], run_dir: Path) -> list[str]:
    lines = [
        "```python",
        "from sentence_transformers import MultiVectorEncoder",
        "",
        f'model = MultiVectorEncoder("{name}")',
        'queries = model.encode_query(["a question"])',
        'documents = model.encode_document(["a text that answers it", "another text"])',
        "print(model.similarity(queries, documents))",
        "```",
        "",
    ]
    opens, by_name = pylate_usage(RunDirectory(run_dir).architecture)
    if not opens:
        return [*lines, "PyLate cannot open this model, because it has settings that PyLate does not have.", ""]
    query, document = (f', prompt_name="{role}"' if role in by_name else "" for role in ("query", "document"))
    return [
        *lines,
        "With PyLate:",
        "",
        "```python",
        "from pylate import models, rank",
        "",
        f'model = models.ColBERT("{name}")',
        f'queries = model.encode(["a question"], is_query=True{query})',
        f'documents = model.encode([["a text that answers it", "another text"]], is_query=False{document})',
        'print(rank.rerank(documents_ids=[["1", "2"]], queries_embeddings=queries, documents_embeddings=documents))',
        "```",
        "",
    ]


def _kind(recipe: Mapping[str, Any]) -> ModelKind:
    return ModelKind(recipe["model"].get("kind") or ModelKind.dense.value)


def _usage(name: str, prompts: Mapping[str, str], _: Path) -> list[str]:
    lines = [
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{name}")',
        'queries = model.encode_query(["a question"])',
        'documents = model.encode_document(["a text that answers it"])',
        "print(model.similarity(queries, documents))",
        "```",
        "",
    ]
    if any(prompts.values()):
        lines += [
            "`encode_query` and `encode_document` prepend the prompts that the model was trained with. Other software "
            "must prepend them too:",
            "",
            "| texts | prompt |",
            "| --- | --- |",
            *(f"| {kind} | {_code(text)} |" for kind, text in prompts.items() if text),
            "",
        ]
    return lines


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
    if any(change.interval for change in shown):
        lines += [
            "",
            f"In parentheses is the {CONFIDENCE:.0%} confidence interval of the change, by a paired bootstrap over "
            "queries. There is no clear change if it contains 0: other queries could show the opposite.",
        ]
    if any(not change.direction for change in shown):
        lines += ["", "A change without an interval may be noise."]
    return [*lines, ""]


def _change(change: Change) -> str:
    interval = f" ({change.interval})" if change.interval else ""
    return f"{change.text}{interval}" + (", no clear change" if interval and change.direction == "noise" else "")


def _hub_id(path: str | None) -> str | None:
    """The path if it is the id of a repository; the Hub rejects cards with other values."""
    is_id = path is not None and may_be_hub_id(path) and is_repository_name(path) and not Path(path).exists()
    return path if is_id else None


def _code(prompt: str) -> str:
    shown = prompt if len(prompt) <= _MAX_PROMPT else f"{prompt[:_MAX_PROMPT]}..."
    return "`` " + repr(shown).replace("|", "\\|") + " ``"


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
