"""The model card of a merged model, and merge.json: which models with which weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedtrain import __version__
from embedtrain.commands.merge.members import Member
from embedtrain.commands.merge.options import LoraMerge, MergeMethod, MergeOptions, SlerpScope
from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import ONNX, WeightsOf
from embedtrain.formats.model_card import UNNAMED, card_header, description, graph_usage, hub_id
from embedtrain.models.hub import split_revision

MERGE_RECORD = "merge.json"
# Options that say where the merge ran, or what is in other keys of the record.
_LEFT_OUT = ("models", "run", "steps", "output_dir", "weights", "timeout", "push_to_hub", "private")


def merge_record(
    options: MergeOptions,
    members: Sequence[Member],
    digests: Sequence[str],
    weights: Sequence[float],
    cosines: Sequence[Sequence[float]],
    search: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The content of merge.json. Of methods with a base, the last of `members` is the base."""
    num_models = len(weights)
    models = [
        {"model": member.name, "digest": digest, "commit": member.source.commit, "weight": weight}
        for member, digest, weight in zip(members, digests, weights, strict=False)
    ]
    record: dict[str, Any] = {"embedtrain": __version__, "models": models}
    if len(members) > num_models:
        record["base"] = {"model": members[-1].name, "digest": digests[-1], "commit": members[-1].source.commit}
    plain = {name: value for name, value in to_plain(options).items() if name not in _LEFT_OUT}
    record |= {"options": plain, "cosines": [list(row) for row in cosines]}
    return record | ({} if search is None else {"search": dict(search)})


def merge_card(
    options: MergeOptions, settings: Member, max_length: int, record: Mapping[str, Any], architecture: Path
) -> str:
    """README.md of the merged model, whose settings are those of the member `settings`."""
    source, kind = settings.source, settings.source.kind
    dimension = settings.truncate_dim or source.dimension
    name = options.push_to_hub or UNNAMED
    models = [*record["models"], *([record["base"]] if "base" in record else [])]
    bases = [hub_id(split_revision(model["model"])[0]) for model in models]
    ids = [base for base in dict.fromkeys(bases) if base]
    title = options.push_to_hub.split("/")[-1] if options.push_to_hub else Path(options.output_dir).name
    lines = [
        card_header(kind, ids, "embedtrain", "merge", *[ONNX] * (ONNX in options.formats), relation="merge"),
        f"# {title}",
        "",
        f"{description(kind, dimension, max_length)}, merged from "
        f"{len(record['models'])} models with embedtrain {__version__}.",
        "",
        *kind.files.usage(name, source.prompts, architecture),
        *graph_usage(kind) * (ONNX in options.formats),
        "## Merged models",
        "",
        f"{_describe_method(options)}",
        "",
        "| model | weight | digest of the weights |",
        "| --- | ---: | --- |",
        *(f"| {_shown(m['model'])} | {m['weight']:.4g} | `{m['digest']}` |" for m in record["models"]),
        *(f"| {_shown(m['model'])} (base) | | `{m['digest']}` |" for m in [record.get("base")] if m),
        "",
        f"`{MERGE_RECORD}` has all options and the cosines of the models' weights.",
        "",
    ]
    return "\n".join([*lines, *_evaluation(record.get("search"))])


def _describe_method(options: MergeOptions) -> str:
    match options.method:
        case MergeMethod.linear:
            if options.lora is LoraMerge.factors:
                return "The factors of the LoRA adapters are the weighted means of those of these checkpoints."
            averages = " moving averages of the" if options.weights_of is WeightsOf.ema else ""
            return f"The weights are the weighted mean of the{averages} weights of these models."
        case MergeMethod.slerp:
            angle = "each tensor" if options.scope is SlerpScope.tensor else "all weights together"
            return f"The weights are the spherical interpolation (slerp) of {angle}, of these models."
        case MergeMethod.task_arithmetic:
            what = f"{options.scale:g} times the weighted mean of the models' differences from it"
        case MergeMethod.ties:
            what = (
                f"{options.scale:g} times the mean of the models' differences from it, of the largest "
                f"{options.density:.0%} of each tensor, where signs agree (TIES)"
            )
    return f"The weights are those of the base, plus {what}."


def _shown(path: str) -> str:
    """A Hub id, or the last parts of a local path: folders above it are private."""
    if hub_id(split_revision(path)[0]):
        return f"`{path}`"
    parts = [part for part in Path(path).parts if part not in ("..", "~", "/")]
    return f"`{'/'.join(parts[-3:] if 'checkpoints' in parts else parts[-2:])}`"


def _evaluation(search: Mapping[str, Any] | None) -> list[str]:
    if search is None:
        return []
    lines = ["## Evaluation", "", "The weights were chosen on some of these sets, which are no test sets any more.", ""]
    sets = list(search["merged"])
    lines += [f"| model | {' | '.join(sets)} |", "| --- |" + " ---: |" * len(sets)]
    rows = {**search["members"], "merged": search["merged"]}
    lines += [
        f"| {_shown(name) if name != 'merged' else name} | {' | '.join(f'{values[s]:.4f}' for s in sets)} |"
        for name, values in rows.items()
    ]
    chosen = ", ".join(search["chosen_on"])
    return [*lines, "", f"Chosen on: {chosen}.", ""]
