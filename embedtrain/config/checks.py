"""Combinations and values that cannot work, found before a model is loaded or a file is written.

Each rule is (is it broken?, the sentence to say). Types and unknown names have been refused before.
"""

import math
from collections.abc import Callable, Sequence

from embedtrain.config.data_checks import FORMAT_SAYS, check_train_sources, is_instruction_format
from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.config.export_checks import check_export
from embedtrain.config.loss_checks import check_loss
from embedtrain.config.model_checks import check_lora, check_model
from embedtrain.config.recipe import Recipe, Strategy
from embedtrain.config.source_losses import source_loss, uses_batches_by_source
from embedtrain.errors import ConfigError

SetRule = tuple[Callable[[EvaluationSet], bool], Callable[[EvaluationSet], str]]

# Each says what stands behind the option's path, such as "evaluation.sets[1].".
SET_RULES: list[SetRule] = [
    (
        lambda s: not s.path,
        lambda s: "path is empty: a BEIR folder, a table, or the id of a Hub data set",
    ),
    (
        lambda s: s.subset is not None and s.subset < 1,
        lambda s: f"subset={s.subset}: at least 1 query or row; null takes all",
    ),
    (
        lambda s: s.subset_documents is not None and s.subset_documents < 1,
        lambda s: f"subset_documents={s.subset_documents}: at least 1 document; null takes all",
    ),
    (
        lambda s: s.query_max_length is not None and s.query_max_length < 3,
        lambda s: f"query_max_length={s.query_max_length} {_NO_ROOM}",
    ),
    (
        lambda s: s.document_max_length is not None and s.document_max_length < 3,
        lambda s: f"document_max_length={s.document_max_length} {_NO_ROOM}",
    ),
    (
        lambda s: s.metrics is not None and not s.metrics,
        lambda s: "metrics=[] measures nothing: name some, such as [ndcg@10], or null for those of its kind",
    ),
    (
        lambda s: s.candidates is not None and s.kind not in (SetKind.auto, SetKind.reranking),
        lambda s: f"candidates={s.candidates} is for kind=reranking, not {s.kind.value}",
    ),
    (
        lambda s: s.train is not None and s.kind not in (SetKind.auto, SetKind.classification),
        lambda s: f"train={s.train} is for kind=classification, not {s.kind.value}",
    ),
    (
        lambda s: s.samples_per_label is not None and s.samples_per_label < 1,
        lambda s: f"samples_per_label={s.samples_per_label}: at least 1 text of each class; null takes all",
    ),
    (
        lambda s: s.experiments < 1,
        lambda s: f"experiments={s.experiments}: at least 1",
    ),
]

_NO_ROOM = "leaves no room for text between special tokens: at least 3"

EVALUATION_RULES: list[tuple[Callable[[Recipe], bool], Callable[[Recipe], str]]] = [
    (
        lambda r: r.evaluation.every < 0,
        lambda r: f"evaluation.every={r.evaluation.every}: a number of steps; 0 evaluates at the end only",
    ),
    (
        lambda r: r.evaluation.chunk_tokens < 1,
        lambda r: f"evaluation.chunk_tokens={r.evaluation.chunk_tokens}: must be above 0",
    ),
    (
        lambda r: r.evaluation.subset is not None and r.evaluation.subset < 1,
        lambda r: f"evaluation.subset={r.evaluation.subset}: at least 1 query or row of each set; null takes all",
    ),
    (
        lambda r: r.evaluation.patience is not None and r.evaluation.patience < 1,
        lambda r: f"evaluation.patience={r.evaluation.patience}: at least 1 evaluation; null never stops early",
    ),
    (
        lambda r: r.evaluation.patience is not None and r.checkpoint.best_metric is None,
        lambda r: (
            f"evaluation.patience={r.evaluation.patience} has nothing to wait for: "
            f"set checkpoint.best_metric to set/metric, such as dev/ndcg@10"
        ),
    ),
    (
        lambda r: r.evaluation.patience is not None and r.evaluation.every == 0,
        lambda r: (
            f"evaluation.patience={r.evaluation.patience} counts evaluations during training: "
            f"set evaluation.every to a number of steps"
        ),
    ),
]


def check_sets(sets: Sequence[EvaluationSet], option: str) -> None:
    """Refuse sets that cannot work.

    Args:
        sets: the elements of a list option.
        option: its path, such as `evaluation.sets`.

    Raises:
        ConfigError: the first rule that is broken, with the element's path.
    """
    for index, one in enumerate(sets):
        for broken, sentence in SET_RULES:
            if broken(one):
                raise ConfigError(f"{option}[{index}].{sentence(one)}")


# A trace holds every operator of its steps, in memory until they are over.
MAX_PROFILED_STEPS = 10


def check_tracking(recipe: Recipe) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: an upload without wandb, or steps or ranks to profile that there cannot be.
    """
    tracking = recipe.tracking
    if tracking.wandb_artifacts and not tracking.wandb:
        raise ConfigError("tracking.wandb_artifacts=true uploads the model to wandb: write tracking.wandb=true as well")
    steps, ranks = tracking.profile, tracking.profile_ranks
    if any(step < 1 for step in steps):
        raise ConfigError(f"tracking.profile={steps}: numbers of steps, counted from 1")
    if len(set(steps)) > MAX_PROFILED_STEPS:
        raise ConfigError(
            f"tracking.profile has {len(set(steps))} steps: at most {MAX_PROFILED_STEPS}, every operator is kept"
        )
    if steps and recipe.train.steps is not None and max(steps) > recipe.train.steps:
        raise ConfigError(f"tracking.profile={steps}: train.steps={recipe.train.steps} is the last step")
    if ranks is not None and (not ranks or any(rank < 0 for rank in ranks)):
        raise ConfigError(f"tracking.profile_ranks={ranks}: numbers of ranks, counted from 0; null is all of them")


Rule = tuple[Callable[[Recipe], bool], Callable[[Recipe], str]]

RULES: list[Rule] = [
    (
        lambda r: not r.name,
        lambda r: "no recipe is chosen: write recipe=NAME (`python -m embedtrain --help` lists them), or set name=",
    ),
    (
        lambda r: not 0 <= r.seed < 2**63,
        lambda r: f"seed={r.seed}: a number from 0 to {2**63 - 1}",
    ),
    (
        lambda r: r.model.path is None and r.model.config is None,
        lambda r: "no model: set model.path to a Hub id or a directory, or model.config to start from random weights",
    ),
    (
        lambda r: r.model.path is not None and r.model.config is not None,
        lambda r: "model.path and model.config are both set: the first loads weights, the second has none; keep one",
    ),
    (
        lambda r: r.model.path is None and r.model.revision is not None,
        lambda r: f"model.revision={r.model.revision} chooses a version of a Hub repository: write model.path=ID",
    ),
    (
        lambda r: r.model.tokenizer is None and r.model.tokenizer_revision is not None,
        lambda r: (
            f"model.tokenizer_revision={r.model.tokenizer_revision} has no use without model.tokenizer: a model's own "
            "tokenizer is of its own revision, model.revision"
        ),
    ),
    (
        lambda r: r.model.config is not None and r.model.pooling is None,
        lambda r: "model.config says nothing of pooling: set model.pooling to cls, mean or last",
    ),
    (
        lambda r: r.model.max_length is not None and r.model.max_length < 3,
        lambda r: f"model.max_length={r.model.max_length} leaves no room for text between special tokens: at least 3",
    ),
    (
        lambda r: not r.data.train,
        lambda r: "data.train is empty: give it files, such as data.train=[my.jsonl]",
    ),
    (
        lambda r: not is_instruction_format(r.data.instruction_format),
        lambda r: f"data.instruction_format={r.data.instruction_format!r} {FORMAT_SAYS}",
    ),
    (
        lambda r: not _positive(r.data.mixing_temperature),
        lambda r: f"data.mixing_temperature={r.data.mixing_temperature}: must be above 0; 1 draws by size and weight",
    ),
    (
        lambda r: r.data.workers < 0,
        lambda r: f"data.workers={r.data.workers}: a number of threads; 0 makes each batch when it is needed",
    ),
    (
        lambda r: (r.train.steps is None) == (r.train.epochs is None),
        lambda r: (
            f"train.steps={r.train.steps} and train.epochs={r.train.epochs}: set exactly one of them "
            f"(null takes the other back)"
        ),
    ),
    (
        lambda r: not all(_positive(value) for value in (r.train.steps, r.train.epochs) if value is not None),
        lambda r: f"train.steps={r.train.steps}, train.epochs={r.train.epochs}: must be above 0",
    ),
    (
        lambda r: r.train.global_batch_size < 2,
        lambda r: f"train.global_batch_size={r.train.global_batch_size}: a contrastive loss needs at least 2 rows",
    ),
    (
        lambda r: r.train.chunk_tokens < 1,
        lambda r: f"train.chunk_tokens={r.train.chunk_tokens}: must be above 0",
    ),
    (
        lambda r: r.train.activation_tokens is not None and r.train.activation_tokens < 0,
        lambda r: (
            f"train.activation_tokens={r.train.activation_tokens}: a number of tokens, 0 to encode every chunk twice"
        ),
    ),
    (
        lambda r: r.train.pass_overhead_tokens is not None and r.train.pass_overhead_tokens < 0,
        lambda r: (
            f"train.pass_overhead_tokens={r.train.pass_overhead_tokens}: 0 or more; null chooses by device and sharding"
        ),
    ),
    (
        lambda r: r.train.gradient_accumulation_steps < 1,
        lambda r: (
            f"train.gradient_accumulation_steps={r.train.gradient_accumulation_steps}: at least 1 global batch a step"
        ),
    ),
    (
        lambda r: r.train.log_every < 1,
        lambda r: f"train.log_every={r.train.log_every}: must be at least 1",
    ),
    (
        lambda r: not _positive(r.optim.lr),
        lambda r: f"optim.lr={r.optim.lr}: must be above 0",
    ),
    (
        lambda r: r.optim.loss_lr is not None and not _positive(r.optim.loss_lr),
        lambda r: f"optim.loss_lr={r.optim.loss_lr}: must be above 0; null takes optim.lr",
    ),
    (
        lambda r: len(r.optim.betas) != 2 or not all(0 <= beta < 1 for beta in r.optim.betas),
        lambda r: f"optim.betas={r.optim.betas}: two numbers from 0 to below 1, such as [0.9, 0.999]",
    ),
    (
        lambda r: not _positive(r.optim.eps),
        lambda r: f"optim.eps={r.optim.eps}: must be above 0",
    ),
    (
        lambda r: not all(math.isfinite(value) and value >= 0 for value in (r.optim.warmup, r.optim.weight_decay)),
        lambda r: f"optim.warmup={r.optim.warmup}, optim.weight_decay={r.optim.weight_decay}: must not be negative",
    ),
    (
        lambda r: r.optim.max_grad_norm is not None and not _positive(r.optim.max_grad_norm),
        lambda r: f"optim.max_grad_norm={r.optim.max_grad_norm}: must be above 0; null switches clipping off",
    ),
    (
        lambda r: r.parallel.shard_size is not None and r.parallel.strategy is not Strategy.hsdp,
        lambda r: (
            f"parallel.shard_size={r.parallel.shard_size} is for parallel.strategy=hsdp, "
            f"not {r.parallel.strategy.value}"
        ),
    ),
    (
        lambda r: r.parallel.shard_size is not None and r.parallel.shard_size < 1,
        lambda r: f"parallel.shard_size={r.parallel.shard_size}: at least 1; null is the ranks of one node",
    ),
    (
        lambda r: not _positive(r.parallel.timeout),
        lambda r: f"parallel.timeout={r.parallel.timeout}: seconds, above 0",
    ),
    (
        lambda r: not _positive(r.parallel.step_timeout),
        lambda r: f"parallel.step_timeout={r.parallel.step_timeout}: seconds, above 0",
    ),
    (
        lambda r: r.checkpoint.every < 0,
        lambda r: f"checkpoint.every={r.checkpoint.every}: a number of steps; 0 saves at the end only",
    ),
    (
        lambda r: r.checkpoint.keep < 1,
        lambda r: f"checkpoint.keep={r.checkpoint.keep}: at least 1, or there is nothing to resume from",
    ),
    (
        lambda r: r.checkpoint.keep_every < 0,
        lambda r: f"checkpoint.keep_every={r.checkpoint.keep_every}: a number of steps; 0 keeps none for good",
    ),
    (
        lambda r: r.checkpoint.max_disk_gb is not None and not _positive(r.checkpoint.max_disk_gb),
        lambda r: f"checkpoint.max_disk_gb={r.checkpoint.max_disk_gb}: must be above 0; null sets no limit",
    ),
    (
        lambda r: r.checkpoint.best_metric is not None and not r.evaluation.sets,
        lambda r: (
            f"checkpoint.best_metric={r.checkpoint.best_metric} needs figures to compare: evaluation.sets is empty"
        ),
    ),
    (
        lambda r: r.checkpoint.best_metric is not None and "/" not in r.checkpoint.best_metric,
        lambda r: f"checkpoint.best_metric={r.checkpoint.best_metric}: written as set/metric, such as dev/ndcg@10",
    ),
    *EVALUATION_RULES,
]


def _positive(value: float) -> bool:
    """Above 0, and neither infinite nor NaN (which every comparison would let pass)."""
    return math.isfinite(value) and value > 0


def check_recipe(recipe: Recipe) -> Recipe:
    """The recipe itself, if no rule is broken.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for broken, sentence in RULES:
        if broken(recipe):
            raise ConfigError(sentence(recipe))
    check_model(recipe.model)
    check_sets(recipe.evaluation.sets, "evaluation.sets")
    check_train_sources(recipe.data.train)
    check_loss(recipe.loss)
    check_export(recipe.export, "export.")
    check_lora(recipe)
    check_tracking(recipe)
    uses_batches_by_source(recipe.data.batches, [source_loss(source, recipe.loss) for source in recipe.data.train])
    return recipe
