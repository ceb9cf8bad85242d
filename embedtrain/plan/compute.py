"""A recipe and machines -> what the plan door tells."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embedtrain.config.recipe import Attention, ModelConfig, ParallelConfig, Recipe
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.adapters import add_adapters, frozen_dtype
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder, stored_dtype
from embedtrain.models.encoder import Encoder
from embedtrain.models.hub import resolve_directory
from embedtrain.models.packing import check_packing
from embedtrain.models.source import ModelSource, open_model_source
from embedtrain.plan.options import PlanOptions
from embedtrain.planning.memory import activation_tokens, step_memory
from embedtrain.planning.model_costs import ModelSpec, model_spec
from embedtrain.planning.strategy import LayoutCandidate, choose, layout_candidates
from embedtrain.planning.workload import ClusterSpec, RankWorkload, StepWorkload

_MOST_RANKS = 4096


def largest_chunk(
    facts: ModelSpec, layout: ParallelLayout, machines: ClusterSpec, work: StepWorkload, *, whole: bool
) -> int | None:
    """The largest `train.chunk_tokens` of whole texts with which the layout fits; None: not even one text.

    It is no larger than what a rank has to encode in a step.
    """
    most = max(1, work.passes(machines.ranks).texts)

    def fits(texts: int) -> bool:
        tried = replace(work, chunk_tokens=texts * work.tokens_per_text)
        return step_memory(facts, layout, machines, tried, whole=whole).total <= machines.usable

    if not fits(1):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * work.tokens_per_text


def changes(
    parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec, work: StepWorkload, best: LayoutCandidate
) -> list[str]:
    """What would make it fit, each as a sentence that says what to write; empty where it fits."""
    if best.fits:
        return []
    told = []
    chunk = largest_chunk(facts, best.layout, machines, work, whole=best.whole)
    if chunk is not None:
        told.append(f"train.chunk_tokens={chunk}: the largest with which {best.name} fits")
    freed = _set_free(parallel)
    if freed is not None:
        fitting = [one for one in layout_candidates(freed, machines, facts, work) if one.fits]
        if fitting:
            quickest = min(fitting, key=lambda one: one.traffic.step)
            told.append(f"leave parallel.* open: {quickest.name} fits")
    ranks = machines.ranks * 2
    while ranks <= _MOST_RANKS:
        more = replace(machines, ranks=ranks)
        if any(one.fits for one in layout_candidates(replace(parallel, shard_size=None), more, facts, work)):
            told.append(f"gpus={ranks}: so many ranks have room for it")
            break
        ranks *= 2
    if facts.trained > 0.5 * facts.parameters:
        told.append("model.lora.rank=16: adapters alone have gradients and Adam's moments")
    if work.tokens_per_text > 128:
        told.append("model.max_length=...: shorter texts, where yours are")
    return told


def _set_free(parallel: ParallelConfig) -> ParallelConfig | None:
    """The options with everything open; None if they are."""
    free = replace(
        parallel,
        strategy=type(parallel.strategy).auto,
        shard_size=None,
        reshard_after_forward=None,
        activation_checkpointing=None,
        cpu_offload=None,
    )
    return None if free == parallel else free


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A plan.

    Attributes:
        name: the recipe's.
        facts: the model.
        machines: where.
        work: what a step does.
        best: the layout that is chosen.
        next_best: the one that would be taken without it.
        activation_tokens: tokens whose graphs are kept: the recipe's value, or what fits in memory beside `best`.
        largest_chunk: the largest `train.chunk_tokens` with which `best` fits; None: none does.
        changes: what to write where it does not fit.
    """

    name: str
    facts: ModelSpec
    machines: ClusterSpec
    work: StepWorkload
    best: LayoutCandidate
    next_best: LayoutCandidate | None
    activation_tokens: int
    largest_chunk: int | None
    changes: list[str]

    @property
    def passes(self) -> RankWorkload:
        """One rank's part of a global batch."""
        return replace(self.work, activation_tokens=self.activation_tokens).passes(self.machines.ranks)

    def as_json(self) -> dict[str, Any]:
        """Plain values. Bytes, seconds and elements are numbers of one.

        `recipe`; `model`: parameters, trained, frozen_bytes by type, and elements of a block, of the root and of a
        large embedding; `machines` and `work` as asked for, with one rank's `passes`; `chosen` and `next_best` (or
        null): the layout, `why`, `fits`, `memory` by kind at its largest `moment`, `traffic`; `largest_chunk` (or
        null); `changes`: sentences.
        """
        facts = self.facts
        return {
            "recipe": self.name,
            "model": {
                "name": facts.name,
                "parameters": facts.parameters,
                "trained": facts.trained,
                "frozen_bytes": facts.frozen_by_dtype,
                "blocks": len(facts.blocks),
                "block_parameters": facts.block.elements,
                "root_parameters": facts.root.elements,
                "embedding_parameters": facts.embedding.elements,
                "hidden": facts.hidden,
                "dimension": facts.dimension,
                "precision": facts.precision.value,
            },
            "machines": {**asdict(self.machines), "usable": self.machines.usable},
            "work": {
                "rows": self.work.rows,
                "texts_per_row": self.work.texts_per_row,
                "tokens_per_text": self.work.tokens_per_text,
                "chunk_tokens": self.work.chunk_tokens,
                "activation_tokens": self.activation_tokens,
                "passes": asdict(self.passes),
            },
            "chosen": _told(self.best),
            "next_best": None if self.next_best is None else _told(self.next_best),
            "largest_chunk": self.largest_chunk,
            "changes": self.changes,
        }


def plan(recipe: Recipe, options: PlanOptions) -> TrainingPlan:
    """Plan a training without a GPU and without weights.

    Raises:
        ConfigError, ModelError: as in training.
    """
    described = describe(recipe)
    length = options.tokens_per_text or described.max_length
    precision = recipe.parallel.precision
    packs = recipe.model.attention is not Attention.padded
    packed = packs and check_packing(described.encoder, precision=precision, gpu=True).padding_reason is None
    facts = model_spec(
        described.encoder, described.blocks, precision=precision, tokens_per_text=length, gpu=True, packed=packed
    )
    machines = ClusterSpec(
        ranks=options.gpus,
        per_node=min(options.gpus, options.gpus_per_node),
        memory=int(options.gpu_memory * 2**30),
        bandwidth_node=options.bandwidth_node * 1e9,
        bandwidth_network=options.bandwidth_network * 1e9,
        flops=options.tflops * 1e12,
    )
    work = StepWorkload.of(recipe, tokens_per_text=length, texts_per_row=options.texts_per_row)
    choice = choose(recipe.parallel, machines, facts, work, measured=True)
    assert choice.best is not None
    best = choice.best
    return TrainingPlan(
        name=recipe.name,
        facts=facts,
        machines=machines,
        work=work,
        best=best,
        next_best=choice.next_best,
        activation_tokens=activation_tokens(facts, best.layout, machines, work, whole=best.whole, free=machines.memory),
        largest_chunk=largest_chunk(facts, best.layout, machines, work, whole=best.whole),
        changes=changes(recipe.parallel, machines, facts, work, best),
    )


def _told(one: LayoutCandidate) -> dict[str, Any]:
    layout = asdict(one.layout)
    return {
        "name": one.name,
        "strategy": layout.pop("strategy").value,
        "why": layout.pop("reason"),
        **layout,
        "whole_gradients": one.whole,
        "fits": one.fits,
        "memory": {**one.memory.kinds, "total": one.memory.total, "moment": one.memory.moment},
        "traffic": {**asdict(one.traffic), "bytes": one.traffic.bytes, "step": one.traffic.step},
    }


# Of a Hub repository: how a model is built, not its weights, and not its tokenizer.
_CONFIGURATION = [
    "config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*/config.json",
    "*/sentence_*_config.json",
]
# Length of texts where neither the recipe nor the model's directory says one.
_USUAL_LENGTH = 512


@dataclass(frozen=True, slots=True)
class MetaEncoder:
    """An encoder without weights.

    Attributes:
        encoder: parameters on the meta device, adapters in place, `requires_grad` as it is trained.
        blocks: the modules inside that become groups of their own.
        max_length: tokens of a text that are kept.
    """

    encoder: Encoder
    blocks: list[nn.Module]
    max_length: int


def describe(recipe: Recipe) -> MetaEncoder:
    """Build what the recipe trains.

    Raises:
        ConfigError, ModelError: as in training.
    """
    model = recipe.model
    source = open_model_source(_fetched(model))
    given = model.config if isinstance(model.config, dict) else {}
    if model.config is not None and model.tokenizer is None and "vocab_size" not in given:
        source.config.get_text_config().vocab_size = model.vocab_size  # one that is trained on the data
    files = open_adapter(model.lora)
    encoder = build_encoder(source)
    if model.lora.on:
        frozen = frozen_dtype(model.lora.base_dtype, recipe.parallel.precision, _stored(source))
        add_adapters(encoder, model.lora, files, frozen)
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None) or _USUAL_LENGTH
    length = source.tokenization.max_length or min(_USUAL_LENGTH, positions)
    return MetaEncoder(encoder, find_blocks(encoder, recipe.parallel.block_class, required=False), length)


def _fetched(model: ModelConfig) -> ModelConfig:
    """The model with a directory for its Hub id; the repository's configuration files are in it, and nothing else."""
    if model.path is None or model.config is not None or Path(model.path).expanduser().is_dir():
        return model
    only = [*_CONFIGURATION, *(["*.py"] if model.trust_remote_code else [])]
    directory = resolve_directory(model.path, model.revision, "model.path", "model.revision", only)
    return replace(model, path=str(directory), revision=None)


def _stored(source: ModelSource) -> torch.dtype:
    """What its weights are stored in; where only its configuration is here, what that says."""
    if source.directory is None or any(source.directory.glob("*.safetensors")):
        return stored_dtype(source)
    return source.config.dtype if isinstance(source.config.dtype, torch.dtype) else torch.float32
