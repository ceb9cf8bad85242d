"""The plan of an evaluation or of mining: memory of a rank, duration of encoding and of the search, traffic, disk."""

from dataclasses import asdict, dataclass
from typing import Any

from embedtrain.commands.plan.compute import PlannedModel, planned_model
from embedtrain.commands.plan.options import PlanOptions
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.errors import ConfigError
from embedtrain.inference.search_costs import SearchCosts, SearchWorkload, search_costs
from embedtrain.planning.strategy import choose_encoding_layout
from embedtrain.tracking.pages import Page
from embedtrain.utils.formatting import format_duration

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
        scan = None if index.scan_dtype is None else index.scan_dtype.value
        work |= {
            "unshard": self.work.unshard.value,
            "index": {"dtype": index.dtype.value, "scan_dtype": scan, "place": index.place.value},
        }
        return {
            "model": {"name": model.name, "parameters": model.weights.parameters, "dimension": model.dimension},
            "cluster": {**asdict(self.planned.cluster), "usable": self.planned.cluster.usable},
            "strategy": self.layout.strategy.value,
            "work": work,
            "fits": self.fits,
            **self.costs.as_json(),
        }


def plan_search(recipe: Recipe, options: PlanOptions) -> SearchPlan:
    """Plan an evaluation or mining with the model of a recipe, without a GPU and without weights."""
    assert options.documents is not None
    if recipe.model.kind != "dense":
        raise ConfigError(
            f"documents={options.documents}: plans of a search are for models with one dense vector per text, not for "
            f"model.kind={recipe.model.kind}; leave it out to plan a training"
        )
    planned = planned_model(recipe, options)
    layout = choose_encoding_layout(recipe.parallel, planned.cluster, planned.model).layout
    work = SearchWorkload(
        documents=options.documents,
        queries=options.queries,
        top_k=min(options.top_k, options.documents),
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
    page.facts(
        [
            ("model", f"{model.name}, {model.weights.parameters:,} parameters, vectors of {model.dimension:,}"),
            ("hardware", f"{cluster.ranks:,} GPUs, {cluster.per_node} per node; {plan.layout.strategy.value}"),
            ("texts", f"{work.documents:,} documents of {work.tokens_per_text:,} tokens, {work.queries:,} queries"),
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
