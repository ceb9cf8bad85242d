"""evaluate.options."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.checks import _positive, check_sets
from embedtrain.config.compose import compose_command
from embedtrain.config.elements import items
from embedtrain.config.evaluation import EvaluationSet, IndexConfig, Unshard
from embedtrain.config.recipe import Pooling, Precision
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of `python -m embedtrain.evaluate`."""

    model: str = ""  # model directory or Hub id
    adapter: str | None = None  # a LoRA adapter on it, as PEFT writes them: directory or Hub id
    sets: list[Any] = field(default_factory=list)  # of EvaluationSet, or of paths
    mteb: list[str] = field(default_factory=list)  # names of mteb's tasks
    subset: int | None = None  # at most so many queries or rows of each set
    output_dir: str = "runs/evaluate"  # metrics.jsonl is written there, and mteb's results
    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalise vectors; default: as the model says
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # tokens (padding included) one forward pass may hold on one rank
    unshard: Unshard = Unshard.layer
    index: IndexConfig = field(default_factory=IndexConfig)
    vectors_dir: str | None = None  # keep documents' vectors there: an evaluation that was stopped goes on
    save_runs: bool = False  # write each retrieval set's ranking and judgements as TREC run and qrels files
    run_depth: int = 100  # documents of each query in a run file; figures go as deep as their metrics
    timeout: float = 1800.0  # seconds a rank waits for the others before all give up


def check_evaluate(options: EvaluateOptions) -> EvaluateOptions:
    """The options themselves, if they can work.

    Raises:
        ConfigError: no model, no set, or a number out of range.
    """
    if not options.model:
        raise ConfigError("no model: write model=DIR, a model directory or a Hub id")
    if not options.sets and not options.mteb:
        raise ConfigError(
            "nothing to evaluate on: write sets=[PATH,...] (folders, tables or Hub data sets), or mteb=[TASK,...]"
        )
    check_sets(options.sets, "sets")
    if options.subset is not None and options.subset < 1:
        raise ConfigError(f"subset={options.subset}: at least 1 query or row of each set; null takes all")
    if options.chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens={options.chunk_tokens}: must be above 0")
    if options.run_depth < 1:
        raise ConfigError(f"run_depth={options.run_depth}: at least 1 document a query")
    if options.max_length is not None and options.max_length < 3:
        raise ConfigError(f"max_length={options.max_length} leaves no room for text between special tokens: at least 3")
    if not _positive(options.timeout):
        raise ConfigError(f"timeout={options.timeout}: seconds, above 0")
    return options


def compose_evaluate(arguments: list[str]) -> EvaluateOptions:
    """The options of `python -m embedtrain.evaluate`."""
    options = compose_command("evaluate", EvaluateOptions, arguments)
    options.sets = items(options.sets, EvaluationSet, "sets")
    return check_evaluate(options)
