"""A plan as a page: the model, memory by kind, what is sent and how long a step takes, and what to change."""

from embedtrain.plan.compute import TrainingPlan
from embedtrain.planning.strategy import LayoutCandidate
from embedtrain.tracking.pages import Page

_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "activations": "activations",
    "loss": "vectors and loss",
    "gathered": "gathered weights",
    "reducing": "gradients in transit",
}
_SENT = {
    "gathers": "all-gathers of weights",
    "reduces": "reduce-scatters of gradients",
    "replicas": "all-reduces over copies",
    "vectors": "vectors of the loss",
}


def print_plan(page: Page, planned: TrainingPlan) -> None:
    """Tell it."""
    others = [planned.best] + [one for one in [planned.next_best] if one is not None]
    names = ["", "chosen", "next best"][: 1 + len(others)]
    page.heading(f"plan of {planned.name}")
    page.facts(_model(planned))
    page.subheading("strategy")
    facts = [("chosen", f"{planned.best.name}: {planned.best.layout.reason}")]
    if planned.next_best is not None:
        short = "" if planned.next_best.fits else ", which does not fit"
        facts.append(("next best", f"{planned.next_best.name}{short}"))
    page.facts(facts)
    page.subheading("memory of one GPU, GiB")
    rows = [[label, *(_gib(one.memory.kinds[kind]) for one in others)] for kind, label in _KINDS.items()]
    rows.append(["all of it", *(_gib(one.memory.total) for one in others)])
    page.table(names, [*rows, ["most when", *(one.memory.moment for one in others)]])
    page.note(
        f"{planned.machines.memory / 2**30:.1f} GiB a GPU, of which {planned.machines.usable / 2**30:.1f} are planned "
        "with: the rest is the driver's and the communication library's",
        "dim",
    )
    page.subheading("what one GPU sends in a step, GB")
    rows = [[label, *(_gb(getattr(one.traffic, kind)) for one in others)] for kind, label in _SENT.items()]
    page.table(names, [*rows, ["all of it", *(_gb(one.traffic.bytes) for one in others)]])
    page.subheading("a step, seconds")
    page.table(names, _seconds(others))
    page.note(_assumed(planned), "dim")
    page.subheading("chunks")
    page.facts(_chunks(planned))
    if planned.changes:
        page.subheading("it does not fit; what would make room")
        for line in planned.changes:
            page.note(line)


def _model(planned: TrainingPlan) -> list[tuple[str, str]]:
    facts, machines, work = planned.facts, planned.machines, planned.work
    weights = f"{facts.parameters:,} parameters"
    if facts.trained < facts.parameters:
        frozen = ", ".join(f"{size / 2**30:.2f} GiB in {name}" for name, size in facts.frozen_by_dtype.items())
        weights += f", {facts.trained:,} of them trained; frozen: {frozen}"
    inside = f"{len(facts.blocks)} layers of {facts.block.elements:,}, {facts.root.elements:,} besides"
    if facts.embedding.elements:
        inside += f", an embedding of {facts.embedding.elements:,}"
    texts = work.rows * work.texts_per_row
    return [
        ("model", f"{facts.name}, {weights}"),
        ("", f"{inside}; computed in {facts.precision.value}, vectors of {facts.dimension:,}"),
        ("machines", f"{machines.ranks:,} GPUs, {machines.per_node} a node"),
        (
            "a batch",
            f"{work.rows:,} rows, {texts:,} texts of {work.tokens_per_text:,} tokens; {planned.passes.texts:,} a GPU",
        ),
    ]


def _seconds(shown: list[LayoutCandidate]) -> list[list[str]]:
    parts = [("computing", "compute"), ("sending that shows", "shown"), ("host memory", "host")]
    if not any(one.traffic.host for one in shown):
        parts.pop()
    rows = [[label, *(f"{getattr(one.traffic, name):.3f}" for one in shown)] for label, name in parts]
    rows.append(["a step", *(f"{one.traffic.step:.3f}" for one in shown)])
    return [*rows, ["sending, hidden or not", *(f"{one.traffic.seconds:.3f}" for one in shown)]]


def _assumed(planned: TrainingPlan) -> str:
    machines = planned.machines
    nodes = f"{machines.bandwidth_network / 1e9:g} GB/s between nodes (bandwidth_network=)"
    return (
        f"estimates, with a GPU's {machines.flops / 1e12:g} TFLOP/s (tflops=), {machines.bandwidth_node / 1e9:g} GB/s "
        f"within a node (bandwidth_node=) and {nodes}"
    )


def _chunks(planned: TrainingPlan) -> list[tuple[str, str]]:
    passes, largest = planned.passes, planned.largest_chunk
    most = "none: not even one text" if largest is None else f"train.chunk_tokens={largest}"
    if largest is not None and passes.texts * planned.work.tokens_per_text <= largest:
        most += ", all that a GPU has in a step"
    return [
        (
            "of the recipe",
            f"train.chunk_tokens={planned.work.chunk_tokens}: {passes.chunks:,} a step on each GPU, with room for the "
            f"graphs of {passes.kept:,}{', the others encoded twice' * (passes.kept < passes.chunks)}",
        ),
        ("largest that fits", most),
    ]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f}"
