"""Runs tasks of mteb: rank 0 calls mteb, all ranks encode and search, and results are mteb's own files."""

import contextlib
import difflib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.commands.evaluate.mteb_channel import (
    AddDocuments,
    CommandChannel,
    EncodeTexts,
    NewIndex,
    ScoreDocuments,
    SearchDocuments,
    StartTask,
)
from embedtrain.config.evaluation import SUITES, IndexConfig, SetKind
from embedtrain.data.images.files import BadPicture, Place, pillow, read_bytes
from embedtrain.data.images.item import Picture, join_parts
from embedtrain.data.tokens import Layout
from embedtrain.data.types import TextRole
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.evaluation.evaluator import ResultCallback
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.index import trec_order
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import install_command

# Characters of the texts that are sent to all ranks at a time.
MAX_CHARACTERS = 1 << 24
# Queries per command, which bounds its size.
_QUERIES_PER_COMMAND = 8192


@dataclass(frozen=True)
class MtebSettings:
    """Settings of a model directory that mteb uses with sentence-transformers as well."""

    prompts: Mapping[str, str]  # by name: of tasks, of types of tasks, `query` and `document`
    default_prompt: str  # for texts without a prompt in `prompts`
    similarity: str  # one of `VectorSimilarity`
    has_text_vectors: bool = True  # one per text, which tasks other than retrieval and reranking need
    reads_pictures: bool = False

    @property
    def modalities(self) -> list[str]:
        """What the model reads, in mteb's words."""
        return ["text", "image"] if self.reads_pictures else ["text"]


class ShardedModel:
    """Encodes and searches for mteb on all ranks; exists on rank 0.

    The name and the revision of `meta`, mteb's ModelMeta, name the result files.
    """

    def __init__(
        self, channel: CommandChannel, settings: MtebSettings, meta: Any, *, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self.mteb_model_meta = meta
        self._channel, self._settings, self._max_characters = channel, settings, max_characters
        self._corpus: Any = None

    def encode(
        self, inputs: Iterable[Mapping[str, list[Any]]], *, task_metadata: Any, prompt_type: Any = None, **_: Any
    ) -> NDArray[np.float32]:
        """Vectors of all texts, float32 [n, D], not normalized."""
        if not self._settings.has_text_vectors:
            raise ConfigError(
                f"{task_metadata.name} needs one vector per text, and a late-interaction model computes one per token; "
                "only tasks of retrieval and reranking are supported"
            )
        prompt = self._prompt(task_metadata, prompt_type)
        # Of mteb's PromptType, a string.
        role = TextRole.query if prompt_type == "query" else TextRole.document

        def encode(texts: list[str]) -> NDArray[np.float32]:
            vectors: Tensor = self._channel.run(EncodeTexts(texts, prompt, role)).cpu()
            return vectors.numpy()

        parts = [encode(texts) for texts in _text_batches(self._items(inputs), self._max_characters)]
        return np.concatenate(parts or [encode([])])

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of all pairs, [n, m]."""
        from sentence_transformers.util.similarity import SimilarityFunction

        return SimilarityFunction.to_similarity_fn(self._settings.similarity)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each pair of rows, [n]."""
        from sentence_transformers.util.similarity import SimilarityFunction

        return SimilarityFunction.to_similarity_pairwise_fn(self._settings.similarity)(embeddings1, embeddings2)

    def index(self, corpus: Any, **_: Any) -> None:
        """Store the corpus; which of its documents are needed is only known in `search`."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Scores of the best documents by query id, best first; only among those of `top_ranked` if it is given."""
        from mteb._create_dataloaders import create_dataloader  # as mteb's own models do; checked on mteb 2.26
        from mteb.types import PromptType

        def read(dataset: Any, prompt_type: Any) -> tuple[Iterator[str], str]:
            with_files = _with_files(dataset)
            options = {"task_metadata": task_metadata, "prompt_type": prompt_type}
            loader = create_dataloader(with_files, batch_size=1024 if with_files is dataset else 64, **options)
            return self._items(loader), self._prompt(task_metadata, prompt_type)

        query_ids = [str(query_id) for query_id in queries["id"]]
        query_texts, prompt = read(queries, PromptType.query)
        texts = list(query_texts)
        corpus, ids = self._needed_documents(top_ranked)
        results: dict[str, dict[str, float]] = {query_id: {} for query_id in query_ids}
        if not ids:
            return results
        self._index_documents(*read(corpus, PromptType.document), ids)
        for start in range(0, len(query_ids), _QUERIES_PER_COMMAND):
            batch = slice(start, start + _QUERIES_PER_COMMAND)
            if top_ranked is None:
                ranking = self._channel.run(SearchDocuments(texts[batch], prompt, top_k))
                lists = ranking.documents.tolist(), ranking.scores.tolist()
                rankings: Iterable[tuple[list[int], list[float]]] = zip(*lists, strict=True)
            else:
                candidates = [top_ranked.get(query_id) or [] for query_id in query_ids[batch]]
                rankings = self._rank_candidates(texts[batch], prompt, candidates, ids, top_k)
            for query_id, (documents, scores) in zip(query_ids[batch], rankings, strict=True):
                results[query_id] = {ids[number]: score for number, score in zip(documents, scores, strict=True)}
        return results

    def _needed_documents(self, top_ranked: Mapping[str, Sequence[str]] | None) -> tuple[Any, list[str]]:
        """The documents to index, and their ids."""
        ids = [str(document_id) for document_id in self._corpus["id"]]
        if top_ranked is None:
            return self._corpus, ids
        candidates = {document for documents in top_ranked.values() for document in documents}
        rows = [row for row, document_id in enumerate(ids) if document_id in candidates]
        return self._corpus.select(rows), [ids[row] for row in rows]

    def _index_documents(self, texts: Iterator[str], prompt: str, ids: Sequence[str]) -> None:
        self._channel.run(NewIndex(trec_order(ids).numpy()))
        first = 0
        for batch in _text_batches(texts, self._max_characters):
            self._channel.run(AddDocuments(batch, prompt, first))
            first += len(batch)

    def _rank_candidates(
        self, queries: list[str], prompt: str, candidates: list[Sequence[str]], ids: Sequence[str], top_k: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """The candidates of each query and their scores, best first, with ties in the order of trec_eval."""
        number_of = {document_id: row for row, document_id in enumerate(ids)}
        numbers = np.full((len(queries), max(map(len, candidates), default=0)), -1, dtype=np.int64)
        for row, documents in enumerate(candidates):
            numbers[row, : len(documents)] = [number_of[document] for document in documents]
        scores = self._channel.run(ScoreDocuments(queries, prompt, numbers)).tolist()
        for documents, row_scores, row_numbers in zip(candidates, scores, numbers.tolist(), strict=True):
            triples = zip(row_scores, documents, row_numbers, strict=False)
            best = sorted(triples, key=lambda triple: triple[:2], reverse=True)[:top_k]
            yield [number for _, _, number in best], [score for score, _, _ in best]

    def _items(self, batches: Iterable[Mapping[str, list[Any]]]) -> Iterator[str]:
        """The texts of mteb's batches, with their pictures in the order of the columns, as in sentence-transformers.

        As there, a column that the model does not read is left out: v3.1 of ViDoRe has the text of each page as well.
        """
        for batch in batches:
            columns = [name for name in batch if name in self._settings.modalities]
            rows: Iterable[tuple[Any, ...]] = zip(*(batch[name] for name in columns), strict=True)
            for number, values in enumerate(rows):
                parts: list[str | Picture] = []
                for name, value in zip(columns, values, strict=True):
                    if name == "text":
                        parts.append(value)
                    elif value is not None:
                        try:
                            parts.append(self._channel.add_picture(_file_of(value)))
                        except BadPicture as bad:
                            where = f"of {batch['id'][number]}" if "id" in batch else f"number {number + 1} of a batch"
                            raise DataError(f"the picture {where} cannot be used: {bad}") from None
                yield join_parts(parts)

    def _prompt(self, task_metadata: Any, prompt_type: Any) -> str:
        """In mteb's order: the prompt of the task, of its type, of queries or documents, the model's default."""
        from mteb.models.abs_encoder import get_prompt_name

        name = get_prompt_name(dict(self._settings.prompts), task_metadata, prompt_type)
        return self._settings.default_prompt if name is None else self._settings.prompts[name]


def _with_files(dataset: Any) -> Any:
    """The data set with the files of its pictures instead of their pixels; itself if it has none."""
    from datasets import Image

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
    return dataset


def _file_of(value: Any) -> bytes:
    """The bytes of a picture's file, of one that `_with_files` has left undecoded, or of an image of Pillow."""
    if isinstance(value, Mapping):
        return value["bytes"] or read_bytes(Place(value["path"]))
    if not isinstance(value, pillow().Image):
        raise DataError(f"a picture is a {type(value).__name__}, not an image of Pillow")
    file = io.BytesIO()
    image = value if value.mode in _PNG_MODES else value.convert("RGB")
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _text_batches(texts: Iterator[str], max_characters: int) -> Iterator[list[str]]:
    """Texts of at most `max_characters` characters in total, or a single longer one."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        if batch and num_characters + len(text) > max_characters:
            yield batch
            batch, num_characters = [], 0
        batch.append(text)
        num_characters += len(text)
    if batch:
        yield batch


# mteb's types of tasks that are kinds of evaluation sets; other types keep mteb's names.
_KINDS = {
    "Retrieval": SetKind.retrieval.value,
    "Any2AnyRetrieval": SetKind.retrieval.value,
    "Any2AnyMultilingualRetrieval": SetKind.retrieval.value,
    "DocumentUnderstanding": SetKind.retrieval.value,
    "Reranking": SetKind.reranking.value,
    "STS": SetKind.sts.value,
    "PairClassification": SetKind.pair_classification.value,
    "BitextMining": SetKind.bitext.value,
    "Classification": SetKind.classification.value,
    "Clustering": SetKind.clustering.value,
}
_MAX_FAILURES = 3  # in the message at the end
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_SETTINGS_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class EvaluatedModel:
    """The model that mteb evaluates."""

    encoder: SentenceEncoder
    source: ModelSource
    name: str  # for mteb's result files: a Hub id, or a directory
    identity: Mapping[str, Any]  # of its vectors; results of another model with the same name are not reused


@dataclass
class TaskResults:
    """The results of several tasks, the same on every rank."""

    # By `task`, or `task/subset/split` if a task has several, the main score by its name.
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # a sentence for each task that could not be run
    unavailable: list[str] = field(default_factory=list)  # ids of data sets that could not be read

    def describe_failures(self) -> str:
        """All of them, and what the Hub has to deliver."""
        count, shown = len(self.failures), self.failures[:_MAX_FAILURES]
        more = f"; and {count - len(shown)} more, which the lines above name" * (count > len(shown))
        text = f"{count} of mteb's tasks could not be run: {'; '.join(shown)}{more}"
        if self.unavailable:
            text += (
                f". The Hub has to deliver {', '.join(dict.fromkeys(self.unavailable))}: connect, or fetch them on a "
                "machine that is connected with `hf download --repo-type dataset ID`, and set HF_HOME to that cache"
            )
        return text


def resolve_tasks(names: Sequence[str], reserved_names: Sequence[str] = (), suites: Sequence[str] = ()) -> list[Any]:
    """The tasks and benchmarks of mteb with these names, and the public tasks of suites, in this order, each task once.

    Raises ConfigError if mteb is not installed, a name is unknown or reserved, or a task is of sound or videos.
    """
    if importlib.util.find_spec("mteb") is None:
        asked = f"mteb={list(names)}" if names else f"suite={','.join(suites)}"
        raise ConfigError(f"{asked} needs a package that is not installed: {install_command('mteb')}")
    for suite in suites:
        if suite in reserved_names:
            raise ConfigError(f"suite={suite}: is also the name of an evaluation set; write {{path: ..., name: ...}}")
    import datasets
    import mteb
    from mteb.get_tasks import TASK_LIST

    # Hide mteb's log and the progress bars of libraries; the encoder reports progress.
    datasets.disable_progress_bars()
    logging.getLogger("mteb").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="mteb")
    task_names = {task.metadata.name for task in TASK_LIST}
    benchmarks = _benchmarks()
    tasks: list[Any] = []
    for name in names:
        if name in task_names:
            tasks.append(mteb.get_task(name))
        elif name in benchmarks:
            tasks += benchmarks[name].tasks
        else:
            similar = difflib.get_close_matches(name, [*task_names, *benchmarks], n=3)
            raise ConfigError(
                f"mteb: {name!r} is not a task or benchmark of mteb {mteb.__version__}"
                + (f"; did you mean {' or '.join(similar)}?" if similar else "; `mteb available-tasks` lists its tasks")
            )
    for suite in suites:
        tasks += _public_tasks(benchmarks[SUITES[suite].benchmark])
    for task in tasks:
        if task.metadata.name in reserved_names:
            raise ConfigError(
                f"mteb: {task.metadata.name} is also the name of an evaluation set; "
                f"write {{path: ..., name: ...}} in sets for another"
            )
        modalities = [modality for modality in task.metadata.modalities if modality not in ("text", "image")]
        if modalities:
            raise ConfigError(
                f"mteb: {task.metadata.name} has {' and '.join(modalities)}; texts and images are supported"
            )
    # Subsets and splits may differ between a task and the same task in a benchmark.
    return list({_key(task): task for task in tasks}.values())


# The name, the subsets and the splits of a task.
TaskKey: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...]]


def _key(task: Any) -> TaskKey:
    return (task.metadata.name, tuple(task.hf_subsets), tuple(task.eval_splits))


def _public_tasks(benchmark: Any) -> list[Any]:
    """Those whose data everybody can read."""
    return [task for task in benchmark.tasks if task.metadata.is_public is not False]


def _benchmarks() -> dict[str, Any]:
    """Those of mteb by their names and aliases."""
    from mteb.benchmarks import get_benchmarks

    return {name: benchmark for benchmark in get_benchmarks() for name in (benchmark.name, *(benchmark.aliases or ()))}


def benchmark_means(
    names: Sequence[str], scores: Mapping[TaskKey, tuple[str, float]], suites: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """The figures of the suites, and of the benchmarks among the names, whose tasks all have a score.

    One metric of all tasks has its mean. Otherwise `mean_task` is the mean of the main scores of all tasks, and
    `mean_task_type` the mean of the means of each type, which have a row each: `BENCHMARK/TYPE`.

    Args:
        scores: the main metric of each task and its score.
    """
    means: dict[str, dict[str, float]] = {}
    benchmarks = _benchmarks()
    tasks_of = {name: list(benchmarks[name].tasks) for name in filter(benchmarks.__contains__, names)}
    tasks_of |= {suite: _public_tasks(benchmarks[SUITES[suite].benchmark]) for suite in suites}
    for name, tasks in tasks_of.items():
        if not all(_key(task) in scores for task in tasks):
            continue
        by_type: dict[str, list[tuple[str, float]]] = {}
        for task in tasks:
            by_type.setdefault(task.metadata.type, []).append(scores[_key(task)])
        means[name] = _mean(list(itertools.chain.from_iterable(by_type.values())), "mean_task")
        if "mean_task" in means[name]:
            of_types = {kind: _mean(of_type, "main_score") for kind, of_type in by_type.items()}
            means[name]["mean_task_type"] = sum(sum(mean.values()) for mean in of_types.values()) / len(of_types)
            means |= {f"{name}/{kind}": mean for kind, mean in of_types.items()}
    return means


def _mean(scores: Sequence[tuple[str, float]], otherwise: str) -> dict[str, float]:
    """The mean of scores by the name of their metric, or by another if they have several."""
    metrics = {metric for metric, _ in scores}
    name = metrics.pop() if len(metrics) == 1 else otherwise
    return {name: sum(score for _, score in scores) / len(scores)}


def check_tasks(tasks: Sequence[Any], layout: Layout) -> None:
    """Raise a ConfigError for a task with items that the model does not read."""
    for task in tasks:
        for side in _sides(task):
            if not layout.reads_pictures and "text" not in side:
                raise ConfigError(
                    f"mteb: {task.metadata.name} has items that are pictures alone, and the model reads texts alone"
                )
            if layout.reads_pictures and len(side) > 1 and not layout.joins_pictures:
                raise ConfigError(
                    f"mteb: {task.metadata.name} has items of a text and a picture, and an item of this model is one "
                    "or the other; ViDoRe(v3) has the pages of ViDoRe(v3.1) without their texts"
                )


def _sides(task: Any) -> list[set[str]]:
    """What an item of each side of a task has; all tasks but those of retrieval have one item after the other."""
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.types import PromptType

    if isinstance(task, AbsTaskRetrieval):
        return [set(task.metadata.get_modalities(side)) for side in (PromptType.query, PromptType.document)]
    return [{modality} for modality in task.metadata.modalities]


def run_tasks(
    tasks: Sequence[Any],
    model: EvaluatedModel,
    console: Console,
    folder: Path,
    *,
    names: Sequence[str] = (),
    suites: Sequence[str] = (),
    index: IndexConfig | None = None,
    vector_cache: VectorCache | None = None,
    max_characters: int = MAX_CHARACTERS,
    progress: ProgressCallback | None = None,
    on_result: ResultCallback | None = None,
) -> TaskResults:
    """Run tasks one after another. A collective; the other ranks follow rank 0.

    Tasks with results in mteb's files are not run again. If a task fails, that is reported and the others still run.

    Args:
        tasks: from `resolve_tasks`; only those of rank 0 are used.
        folder: of mteb's files: `results/MODEL/REVISION/TASK.json`.
        names, suites: those that the tasks were resolved from; benchmarks and suites have a row as well.
        max_characters: of the texts that are sent to all ranks at a time.
        progress: called with the name of the task before the description.
        on_result: called on rank 0 after each task.

    Raises TrainingError on every rank if a vector is not finite, FailedElsewhere on the others if rank 0 failed alone.
    """
    encoder, world = model.encoder, model.encoder.world
    with world.fail_together("reading the model's settings for mteb"):
        settings = replace(read_settings(model.source), reads_pictures=encoder.tokenizer.layout.reads_pictures)
    channel = CommandChannel(encoder, world, index or IndexConfig(), vector_cache=vector_cache)
    results, scores = TaskResults(), dict[TaskKey, tuple[str, float]]()
    if world.is_main:
        try:
            meta = _model_meta(model, settings)
            sharded_model = ShardedModel(channel, settings, meta, max_characters=max_characters)
            for task in tasks:
                channel.run(StartTask(task.metadata.name))
                if progress is not None:
                    encoder.progress = functools.partial(_prefixed_progress, progress, task.metadata.name)
                with console.phase(f"running {task.metadata.name}"):
                    metrics, failures = _run_task(task, sharded_model, folder, channel)
                results.metrics |= metrics
                scores |= {_key(task): score for score in metrics.get(task.metadata.name, {}).items()}
                if on_result is not None:
                    kind = _KINDS.get(task.metadata.type, task.metadata.type)
                    dataset = DatasetInfo(
                        kind,
                        {},
                        subset=False,
                        precision=encoder.precision,
                        token_pooling=channel.index.token_pooling,
                    )
                    for name, values in metrics.items():
                        on_result(name, values, dataset)
                results.failures += failures
                results.unavailable += [_path(task)] * any(_dataset_unavailable(task) in text for text in failures)
                for failure in failures:
                    console.warn(failure)
            for name, values in (benchmark_means(names, scores, suites) if names or suites else {}).items():
                results.metrics[name] = values
                if on_result is not None:
                    of_mean = DatasetInfo("mean", {}, subset=False, precision=encoder.precision)
                    on_result(name, values, of_mean)
        except BaseException as error:
            channel.finish(error)
            raise
        channel.finish()
    else:
        channel.serve()
    return world.broadcast(results, TaskResults)


def _prefixed_progress(progress: ProgressCallback, task: str, description: str, done: int, total: int) -> None:
    progress(f"{task}: {description}", done, total)


def _run_task(
    task: Any, model: ShardedModel, folder: Path, channel: CommandChannel
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The metrics of a task, and a sentence about each failure."""
    import mteb

    name = task.metadata.name
    try:
        # Some progress bars of mteb cannot be switched off.
        with contextlib.redirect_stderr(io.StringIO()):
            result = mteb.evaluate(
                model,
                task,
                co2_tracker=False,
                cache=mteb.ResultCache(folder),
                encode_kwargs={"batch_size": 1024, "show_progress_bar": False},
                show_progress_bar=False,
            )
    except Exception as error:  # data sets, scikit-learn and mteb itself may raise anything
        if not channel.in_sync:  # not an error of this task: vectors that are not finite, no memory, a lost rank
            raise
        reason = textwrap.shorten(str(error) or "no reason given", 300, placeholder=" ...")
        failure = "failed" if task.data_loaded else _dataset_unavailable(task)
        task.unload_data()
        return {}, [f"mteb task {name}: {failure} ({type(error).__name__}: {reason})"]
    metrics: dict[str, dict[str, float]] = {}
    for task_result in result.task_results:
        metrics |= _main_scores(task_result, task.metadata.main_score)
    unavailable = _dataset_unavailable(task)
    return metrics, [f"mteb task {name}: {unavailable} ({failure.exception})" for failure in result.exceptions or []]


def _main_scores(result: Any, metric: str) -> dict[str, dict[str, float]]:
    """The main score of a task, and of each of its subsets and splits if there are several."""
    parts = [(split, part) for split, rows in result.scores.items() for part in rows]
    parts = [(split, part) for split, part in parts if part.get("main_score") is not None]
    metrics: dict[str, dict[str, float]] = {}
    if parts:
        mean = sum(float(part["main_score"]) for _, part in parts) / len(parts)
        metrics[result.task_name] = {metric: mean}
    if len(parts) > 1:
        for split, part in parts:
            metrics[f"{result.task_name}/{part['hf_subset']}/{split}"] = {metric: float(part["main_score"])}
    return metrics


def _path(task: Any) -> str:
    return str((task.metadata.dataset or {}).get("path", "(no path)"))


def _dataset_unavailable(task: Any) -> str:
    return f"its data set {_path(task)} is not available"


def _model_meta(model: EvaluatedModel, settings: MtebSettings) -> Any:
    """The model's description for mteb. The revision changes with everything that its vectors depend on."""
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    tokenizer = model.encoder.tokenizer
    identity = {**model.identity, "prompts": dict(settings.prompts), "max_length": tokenizer.max_length}
    identity |= {"tokenizer": tokenizer.fingerprint, "similarity": settings.similarity}
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = expand_user(model.name)
    # mteb's names are `organization/model`; for a directory, its parent takes the place of the organization.
    name = "/".join(path.resolve().parts[-2:]) if path.exists() else model.name
    return ModelMeta.create_empty(
        overwrites={
            "name": name if "/" in name else f"local/{name}",
            "revision": digest,
            "similarity_fn_name": ScoringFunction(settings.similarity),
            "max_tokens": tokenizer.max_length,
            "modalities": settings.modalities,
        }
    )


def read_settings(source: ModelSource) -> MtebSettings:
    """The prompts of a model directory as sentence-transformers reads them, and how its vectors are compared."""
    content = _read_settings_file(source)
    default_prompt = source.prompts.get(str(content.get("default_prompt_name")), "")
    if not source.kind.measures_classes:
        return MtebSettings(source.prompts, default_prompt, "cosine", has_text_vectors=False)
    return MtebSettings(source.prompts, default_prompt, source.vectors.similarity.value)


def _read_settings_file(source: ModelSource) -> dict[str, Any]:
    """The settings file is beside modules.json: in the directory of the backbone, or in its parent."""
    folders = [] if source.directory is None else [source.directory, source.directory.parent]
    path = next((folder / _SETTINGS_FILE for folder in folders if (folder / "modules.json").is_file()), None)
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}
