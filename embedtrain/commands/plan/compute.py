"""The plan of a training: the chosen layout and its costs, the largest chunk, and how to make it fit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.evaluation import check_index_of_kind
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import Attention, OnError, ParallelConfig, Precision, Recipe, Strategy, TrainSource
from embedtrain.config.source_losses import source_requirements
from embedtrain.data.rows import Example
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.train_data import resolve_sources
from embedtrain.distributed.block_compute import wants_compiled_blocks
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.inference.search_costs import SearchCosts, SearchWorkload, search_costs
from embedtrain.inference.store import require_kept_in_memory
from embedtrain.models.attention import KERNEL_CAPABILITY
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import check_packing
from embedtrain.models.sparse_head import words_per_block
from embedtrain.planning.flops import token_flops
from embedtrain.planning.memory import (
    ClusterSpec,
    RankWorkload,
    StepWorkload,
    fit_activation_tokens,
    host_memory,
    step_memory,
)
from embedtrain.planning.model_costs import ModelSpec, build_meta_encoder, model_spec
from embedtrain.planning.strategy import (
    LayoutCandidate,
    LayoutChoice,
    choose_encoding_layout,
    choose_layout,
    layout_candidates,
    smaller_moments,
)
from embedtrain.tracking.pages import Page
from embedtrain.training.optimizer import describe_groups, trained_parameters
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import format_duration

if TYPE_CHECKING:
    from embedtrain.commands.plan import PlanOptions

_MAX_RANKS = 4096
# What the memory and the traffic of a search consist of.
_MEMORY = {
    "parameters": "parameters",
    "gathered": "unsharded weights",
    "activations": "activations of a forward pass",
    "embeddings": "embeddings of a block of texts",
    "index": "vectors that a search reads",
    "buffers": "scores and candidates of a search",
    "host_index": "vectors in host memory",
    "host_plan": "which rank encodes which text",
    "host_tokens": "tokens",
}
_TRAFFIC = {
    "weights": "all-gathers of weights",
    "texts": "hashes, lengths and tokens of texts",
    "queries": "vectors of queries",
    "results": "results",
}
# Rows of a source that are read for their number of negatives, and the bytes of the piece in which they are.
_SAMPLED_ROWS, _SAMPLED_BYTES = 256, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyHead:
    """Costs of the vocabulary head of a sparse model on one rank."""

    words: int  # of the vocabulary
    block_words: int  # words whose logits of all tokens of a chunk exist at a time
    logits: int  # bytes of these logits
    weights: int  # bytes of the weights of words, and of the tokens that have them, of the texts with cached graphs
    flops: float  # of a step

    @property
    def blocks(self) -> int:
        """Blocks of words."""
        return -(-self.words // self.block_words)


_UNKNOWN_ROWS = (
    "the rows are not here: their negatives are those that data.train asks for; texts_per_row=N counts a query, its "
    "positive and all negatives"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A plan."""

    name: str  # of the recipe
    model: ModelSpec
    cluster: ClusterSpec
    work: StepWorkload  # its `activation_tokens` are the recipe's, or those that fit with `best`
    assumptions: list[str]  # about texts and rows that are not known
    choice: LayoutChoice
    vocabulary_head: VocabularyHead | None  # of a sparse model
    largest_chunk: int | None  # largest `train.chunk_tokens` with which `best` fits; None: not even one text
    changes: list[str]  # options to change if it does not fit
    parameter_groups: dict[str, str]  # settings of each group, if the recipe has several

    @property
    def best(self) -> LayoutCandidate:
        """The chosen layout, with its costs."""
        assert self.choice.best is not None
        return self.choice.best

    @property
    def next_best(self) -> LayoutCandidate | None:
        """The best of the other layouts; None if there is one only."""
        return self.choice.next_best

    @property
    def local(self) -> RankWorkload:
        """One rank's part of a global batch."""
        return self.work.per_rank(self.cluster.ranks)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values; sizes in bytes, times in seconds.

        `recipe`; `model`: elements of all, trained, block, root and embedding weights, bytes of frozen weights by type;
        `cluster`; `work`, with one rank's part as `per_rank`; `chosen` and `next_best` (or null): layout, `reason`,
        `fits`, `memory` by kind in the peak `phase`, `host_memory` of a node by kind, `traffic`; `vocabulary_head` of a
        sparse model (or null); `largest_chunk` (or null); `changes` and `assumptions`: sentences.
        """
        model, weights = self.model, self.model.weights
        return {
            "recipe": self.name,
            "model": {
                "name": model.name,
                "parameters": weights.parameters,
                "trained": weights.trained,
                "frozen_bytes": weights.frozen_by_dtype,
                "blocks": len(weights.blocks),
                "block_parameters": weights.largest_block.elements,
                "root_parameters": weights.root.elements,
                "embedding_parameters": weights.embedding.elements,
                "hidden": model.hidden,
                "dimension": model.dimension,
                "vectors": {"query": model.vectors[0], "document": model.vectors[1]},
                "precision": model.precision.value,
                "parameter_groups": self.parameter_groups,
            },
            "cluster": {**asdict(self.cluster), "usable": self.cluster.usable},
            "work": {
                "rows": self.work.rows,
                "texts_per_row": self.work.texts_per_row,
                "tokens_per_text": self.work.tokens_per_text,
                "picture_cost": self.work.picture_cost,
                "chunk_tokens": self.work.chunk_tokens,
                "activation_tokens": self.work.activation_tokens,
                "per_rank": asdict(self.local),
            },
            "chosen": _candidate_json(self.best),
            "next_best": None if self.next_best is None else _candidate_json(self.next_best),
            "vocabulary_head": None if self.vocabulary_head is None else asdict(self.vocabulary_head),
            "largest_chunk": self.largest_chunk,
            "changes": self.changes,
            "assumptions": self.assumptions,
        }


def _candidate_json(candidate: LayoutCandidate) -> dict[str, Any]:
    memory, traffic = candidate.memory, candidate.traffic
    return {
        "name": candidate.name,
        **asdict(candidate.layout),
        "strategy": candidate.layout.strategy.value,
        "reduce_per_step": candidate.reduce_per_step,
        "fits": candidate.fits,
        "memory": {**memory.by_kind, "total": memory.total, "phase": memory.phase},
        "host_memory": {**candidate.host.by_kind, "total": candidate.host.total},
        "traffic": {**asdict(traffic), "bytes": traffic.bytes, "seconds": traffic.seconds},
    }


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model of a recipe and the hardware of a plan."""

    encoder: Encoder  # on the meta device
    model: ModelSpec
    cluster: ClusterSpec
    tokens_per_text: int
    is_limit: bool  # whether that is the length limit of the model, because `tokens_per_text` is not given

    @property
    def assumptions(self) -> list[str]:
        """Says that every text is planned as the longest one, if it is."""
        if not self.is_limit:
            return []
        limit = f"every text is planned at the length limit of {self.tokens_per_text:,} tokens"
        return [f"{limit}; tokens_per_text=N plans with the mean of your texts"]


def planned_model(recipe: Recipe, options: "PlanOptions") -> PlannedModel:
    """The costs of a recipe's model, without weights; raises ConfigError and ModelError as training does."""
    precision = recipe.parallel.precision
    if precision is Precision.auto:  # of GPUs that are not here
        precision = Precision.bf16
        recipe = replace(recipe, parallel=replace(recipe.parallel, precision=precision))
    meta = build_meta_encoder(recipe)
    encoder = meta.encoder
    length = options.tokens_per_text or meta.max_length
    of_texts = (options.tokens_per_query or length, length)
    of_query, of_document = (meta.source.kind.vectors_per_text(meta.source, of_text) for of_text in of_texts)
    vectors = of_query[0], of_document[1]
    packable = recipe.model.attention is not Attention.padded
    packed = (
        packable and check_packing(encoder, precision=precision, capability=KERNEL_CAPABILITY).padding_reason is None
    )
    parallel = recipe.parallel
    is_compiled = wants_compiled_blocks(parallel, gpu=True)
    model = model_spec(
        encoder,
        meta.blocks,
        precision=precision,
        tokens_per_text=length,
        gpu=True,
        packed=packed,
        fused=parallel.fused_kernels is True and not is_compiled,  # auto: whether it is installed there is unknown
        vectors=vectors,
    )
    cluster = ClusterSpec(
        ranks=options.gpus,
        per_node=min(options.gpus, options.gpus_per_node),
        memory=int(options.gpu_memory * 2**30),
        host_memory=None if options.host_memory is None else int(options.host_memory * 2**30),
        bandwidth_node=options.bandwidth_node * 1e9,
        bandwidth_network=options.bandwidth_network * 1e9,
        flops=options.tflops * 1e12,
    )
    return PlannedModel(encoder, model, cluster, length, options.tokens_per_text is None)


def plan(recipe: Recipe, options: "PlanOptions", *, mined: Mapping[Path, int] | None = None) -> TrainingPlan:
    """Plan a training without a GPU and without weights; raises ConfigError and ModelError as training does.

    `mined` are folders that a pipeline will write, with the number of negatives of their rows.
    """
    planned = planned_model(recipe, options)
    model, cluster, length, parallel = planned.model, planned.cluster, planned.tokens_per_text, recipe.parallel
    if parallel.precision is Precision.auto:
        parallel = replace(parallel, precision=model.precision)
    texts_per_row = options.texts_per_row or first_rows(recipe, mined or {})
    work = StepWorkload.of(recipe, tokens_per_text=length, texts_per_row=texts_per_row)
    work = replace(work, picture_cost=model.weights.picture_cost)
    choice = choose_layout(parallel, cluster, model, work, always_measure=True)
    assert choice.best is not None
    layout, reduce_per_step = choice.best.layout, choice.best.reduce_per_step
    activation_tokens = fit_activation_tokens(
        model, layout, cluster, work, reduce_per_step=reduce_per_step, free=cluster.memory
    )
    fitted = replace(work, activation_tokens=activation_tokens)
    has_vocabulary = any(tower.output.has_vocabulary for tower in planned.encoder.towers.values())
    return TrainingPlan(
        name=recipe.name,
        model=model,
        cluster=cluster,
        work=fitted,
        assumptions=[*planned.assumptions, *([_UNKNOWN_ROWS] if texts_per_row is None else [])],
        choice=choice,
        vocabulary_head=_vocabulary_head(model, fitted.per_rank(cluster.ranks), length) if has_vocabulary else None,
        largest_chunk=largest_chunk(model, layout, cluster, work, reduce_per_step=reduce_per_step),
        changes=changes(parallel, cluster, model, work, choice.best),
        parameter_groups=describe_groups(trained_parameters(planned.encoder, recipe.optim), recipe.optim),
    )


def first_rows(recipe: Recipe, mined: Mapping[Path, int]) -> int | None:
    """Query and documents of the first rows of each source, as training draws them; the most of all sources.

    None unless every source is a local file or folder that can be read, or is below a folder of `mined`: planning needs
    no data and downloads none.
    """
    counts = list[int]()
    try:
        for source in recipe.data.train:
            path = expand_user(source.path)
            of_stage = [count for folder, count in mined.items() if path.absolute().is_relative_to(folder.absolute())]
            if of_stage:
                counts.append(2 + _drawn(source, of_stage[0]))
                continue
            if not path.exists():
                return None
            one_recipe = replace(recipe, data=replace(recipe.data, train=[source]))
            for one, loss in zip(*resolve_sources(one_recipe), strict=True):
                reader = SourceReader(one, one.path, source_requirements(one, loss, recipe))
                layout = reader.detect_layout(OnError.skip)
                if reader.document_parts:  # rows name documents by id
                    return None
                rows = islice(reader.rows(reader.pieces(_SAMPLED_BYTES)[0], layout), _SAMPLED_ROWS)
                texts = [texts for _, texts in rows if isinstance(texts, Example)]
                negatives = max(len(row.negatives) for row in texts)
                counts.append(2 + _drawn(one, negatives) if any(row.positives.texts for row in texts) else 1)
    except (EmbedtrainError, ValueError):  # training reports it
        return None
    return max(counts, default=None)


def _drawn(source: TrainSource, negatives: int) -> int:
    return negatives if source.negatives is None else min(negatives, source.negatives)


def _vocabulary_head(model: ModelSpec, local: RankWorkload, tokens_per_text: int) -> VocabularyHead:
    words, tokens = model.dimension, min(local.tokens, local.texts * tokens_per_text)
    block_words = words_per_block(tokens, words, "cuda")
    elements = words * model.hidden
    cached = min(local.texts, local.num_cached_graphs * tokens // tokens_per_text)
    return VocabularyHead(
        words=words,
        block_words=block_words,
        logits=tokens * block_words * model.compute_bytes,
        weights=cached * words * (4 + 4),  # float32 and int32
        flops=local.texts * tokens_per_text * sum(token_flops(elements, elements, 0.0)),
    )


def largest_chunk(
    model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, work: StepWorkload, *, reduce_per_step: bool
) -> int | None:
    """The largest `train.chunk_tokens`, in whole texts, with which the layout fits; None: not even one text.

    It is at most the number of tokens that a rank encodes in a step.
    """

    def fits(texts: int) -> bool:
        resized = replace(work, chunk_tokens=texts * work.cost_per_text)
        return step_memory(model, layout, cluster, resized, reduce_per_step=reduce_per_step).total <= cluster.usable

    if not fits(1):
        return None
    low, high = 1, max(1, work.per_rank(cluster.ranks).texts)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * work.cost_per_text


def changes(
    parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec, work: StepWorkload, best: LayoutCandidate
) -> list[str]:
    """Changes with which the training would fit, each with the option to write; empty if it fits."""
    if best.fits:
        return []
    sentences = []
    if not best.host.fits(cluster) and work.checkpoint.stages:
        in_place = replace(work, checkpoint=replace(work.checkpoint, asynchronous=False))
        if host_memory(model, best.layout, cluster, in_place).fits(cluster):
            sentences.append("checkpoint.asynchronous=false: saves without a copy in host memory, while training waits")
    chunk = largest_chunk(model, best.layout, cluster, work, reduce_per_step=best.reduce_per_step)
    if chunk is not None:
        sentences.append(f"train.chunk_tokens={chunk}: the largest with which {best.name} fits")
    automatic = replace(
        parallel,
        strategy=Strategy.auto,
        shard_size=None,
        reshard_after_forward=None,
        activation_checkpointing=None,
        cpu_offload=None,
    )
    if automatic != parallel:
        fitting = [c for c in layout_candidates(automatic, cluster, model, work) if c.fits]
        if fitting:
            fastest = min(fitting, key=lambda candidate: candidate.traffic.seconds)
            sentences.append(f"leave parallel.* unset: {fastest.name} fits")
    moments = smaller_moments(parallel, cluster, model, work)
    if moments is not None:
        sentences.append(f"{moments[0]}: {moments[1].name} fits")
    ranks = cluster.ranks * 2
    while ranks <= _MAX_RANKS:
        larger = replace(cluster, ranks=ranks)
        if any(c.fits for c in layout_candidates(replace(parallel, shard_size=None), larger, model, work)):
            sentences.append(f"gpus={ranks}: fits on this number of ranks")
            break
        ranks *= 2
    if model.weights.trained > 0.5 * model.weights.parameters:
        sentences.append("model.lora.rank=16: only adapters need gradients and Adam's moments")
    if work.tokens_per_text > 128:
        sentences.append("model.max_length=...: if your texts are shorter")
    return sentences


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A plan."""

    planned: PlannedModel
    layout: ParallelLayout
    work: SearchWorkload
    costs: SearchCosts

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory on its device."""
        return self.costs.memory.device <= self.planned.cluster.usable

    def as_json(self) -> dict[str, Any]:
        """Plain values: sizes in bytes, times in seconds."""
        model, work = self.planned.model, asdict(self.work)
        index = self.work.index
        work |= {
            "unshard": self.work.unshard.value,
            "index": {name: value.value if isinstance(value, Enum) else value for name, value in asdict(index).items()},
        }
        return {
            "model": {
                "name": model.name,
                "parameters": model.weights.parameters,
                "dimension": model.dimension,
                "vectors": model.vectors,
            },
            "cluster": {**asdict(self.planned.cluster), "usable": self.planned.cluster.usable},
            "strategy": self.layout.strategy.value,
            "work": work,
            "fits": self.fits,
            "assumptions": self.planned.assumptions,
            **self.costs.as_json(),
        }


def plan_search(recipe: Recipe, options: "PlanOptions") -> SearchPlan:
    """Plan an evaluation or mining with the model of a recipe, without a GPU and without weights."""
    assert options.documents is not None
    kind = load_kind(recipe.model.kind)
    if not (kind.has_one_vector or kind.has_token_vectors):
        raise ConfigError(
            f"documents={options.documents}: plans of a search are for models with one dense vector per text or per "
            f"token, not for model.kind={kind.name}; leave it out to plan a training"
        )
    check_index_of_kind(options.index, "index.", kind)
    if kind.has_token_vectors:
        require_kept_in_memory(options.index, "late-interaction model")
    planned = planned_model(recipe, options)
    layout = choose_encoding_layout(recipe.parallel, planned.cluster, planned.model).layout
    work = SearchWorkload(
        documents=options.documents,
        queries=options.queries,
        top_k=min(options.search_depth, options.documents),
        tokens_per_text=planned.tokens_per_text,
        tokens_per_query=options.tokens_per_query or planned.tokens_per_text,
        chunk_tokens=recipe.evaluation.chunk_tokens,
        unshard=recipe.evaluation.unshard,
        index=options.index,
        search_flops=options.search_tflops * 1e12,
        tokens_per_second=options.tokens_per_second,
    )
    return SearchPlan(planned, layout, work, search_costs(planned.model, layout, planned.cluster, work))


def print_search_plan(page: Page, plan: SearchPlan) -> None:
    """Print the plan to the page."""
    model, cluster, work, costs = plan.planned.model, plan.planned.cluster, plan.work, plan.costs
    memory, traffic, index = costs.memory, costs.traffic, work.index
    page.heading(f"plan of a search of {work.documents:,} documents")
    place = "on the GPU" if costs.on_device else "in files" if not memory.host_index else "in host memory"
    copy = "" if index.scan_dtype is None else f", copied in {index.scan_dtype.value}"
    if index.first_stage is not None:
        copy = f", of which the best {index.first_stage:,} by one in {index.first_stage_pooling:g} are scored"
    if index.token_pooling > 1:
        copy = f", one in {index.token_pooling:g}{copy}"
    vectors = f"vectors of {model.dimension:,}"
    if model.vectors != (1, 1):
        vectors = f"{model.vectors[1]:,} vectors of {model.dimension:,} a document, {model.vectors[0]:,} a query"
    page.facts(
        [
            ("model", f"{model.name}, {model.weights.parameters:,} parameters, {vectors}"),
            ("hardware", f"{cluster.ranks:,} GPUs, {cluster.per_node} per node; {plan.layout.strategy.value}"),
            ("texts", f"{work.documents:,} documents of {work.tokens_per_text:,} tokens, {work.queries:,} queries"),
            *(("", sentence) for sentence in plan.planned.assumptions),
            ("index", f"vectors in {index.dtype.value}{copy}; a search reads them {place}"),
        ]
    )
    page.subheading("memory of a rank, GiB")
    by_kind = memory.by_kind
    rows = [[label, f"{by_kind[kind] / 2**30:,.2f}"] for kind, label in _MEMORY.items()]
    rows += [
        ["most on the GPU at a time", f"{memory.device / 2**30:,.2f}"],
        ["in host memory", f"{memory.host / 2**30:,.2f}"],
        [f"in host memory of a node, {cluster.per_node} ranks", f"{cluster.per_node * memory.host / 2**30:,.2f}"],
    ]
    page.table(["", "GiB"], rows)
    page.subheading("duration and traffic")
    page.table(
        ["sent by a rank", "GB"], [[label, f"{getattr(traffic, kind) / 1e9:,.2f}"] for kind, label in _TRAFFIC.items()]
    )
    page.facts(
        [
            ("tokenizing", format_duration(traffic.tokenize_seconds)),
            ("encoding", format_duration(traffic.encode_seconds)),
            ("searching", format_duration(traffic.search_seconds)),
            ("disk", f"{costs.disk / 1e9:,.1f} GB of vectors, with vectors_dir or mining"),
        ]
    )
    page.note(
        f"estimates for {cluster.flops / 1e12:g} TFLOP/s per GPU in encoding (tflops=), "
        f"{work.search_flops / 1e12:g} in fp32 products (search_tflops=), and {work.tokens_per_second:,.0f} tokens per "
        "second that the cores of a rank create (tokens_per_second=)",
        "dim",
    )
    if not plan.fits:
        page.note("it does not fit: write index.scan_dtype=int8, index.place=host or disk, or more gpus")
