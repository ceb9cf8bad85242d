"""The commands: what each declares, and the only table of them.

The console command, `python -m embedtrain`, the launcher, stages of pipelines, `submit`, completion, suggestions and
the Python API all read it. Nothing here imports torch, nor a command before it is used.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from embedtrain.errors import ConfigError

if TYPE_CHECKING:
    from embedtrain.config.kinds import Kind

# What commands write, by the name that follows the dot in ${out:STAGE.model}; `dir` is the whole directory of a stage.
MODEL, DATA, VECTORS, RUN, DIR = "model", "data", "vectors", "run", "dir"


# What commands are for, in the order of the overview and of the reference.
TOPICS = {
    "train": "Train",
    "data": "Prepare data",
    "evaluate": "Evaluate and search",
    "models": "Export models, and make others of them",
}


def _nothing(_options: Any) -> None:
    """For commands without paths."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: what follows `embedtrain`, or `python -m embedtrain`: a name, or `module:NAME` of a command in a module of
            the user's.
        summary: its line in the overview.
        topic: the key of TOPICS that it is listed with.
        options: the dataclass of its options, or `module:Class` of one that is imported when it is needed.
        compose: from the command line to checked options; it imports no torch, and paths need not exist.
        require_paths: raises a ConfigError for options with paths that do not exist.
        run: runs it with what `compose` returns; with `saves_on_signal` also with the signals. It joins the other ranks
            itself, by `joined_world`.
        ranks: whether several processes may run it together, one per GPU; otherwise it runs in one.
        computes: whether the process is prepared for torch, which is imported for it; a command that needs none begins
            at once.
        takes_recipe: whether its command line takes the options of a training as well.
        saves_on_signal: whether a signal ends it with a checkpoint, so that it resumes as if nothing had happened.
        output: the option that names the directory where it writes. A command that has one can be a stage of a pipeline
            and be submitted to a cluster.
        folder: of a stage, what `output` is below the directory of the stage; empty for the directory itself.
        outputs: what later stages can refer to, as paths or patterns below the directory of the stage.
        resumes: whether it resumes what it has begun; otherwise a stage starts again in an empty directory.
        takes: by an option that names a model, which kinds of models it takes; other options take any.
        kind: of the model that it writes, if that is always the same.
        makes_smaller: whether the model that it writes is smaller than the one that it is from, by how much is known
            only when it has ended.
    """

    name: str
    summary: str
    options: type[Any] | str
    compose: Callable[[list[str]], Any]
    run: Callable[..., Any]
    topic: str = ""
    require_paths: Callable[[Any], object] = _nothing
    ranks: bool = False
    computes: bool = True
    takes_recipe: bool = False
    saves_on_signal: bool = False
    output: str | None = None
    folder: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = False
    takes: "Mapping[str, Callable[[Kind], bool]]" = field(default_factory=dict)
    kind: str | None = None
    makes_smaller: bool = False

    @property
    def option_class(self) -> type[Any]:
        """The dataclass of the options."""
        if isinstance(self.options, str):
            module, _, name = self.options.partition(":")
            found: type[Any] = _load(module, name)
            return found
        return self.options

    @property
    def label(self) -> str:
        """The name without a module, in lower case: for names of jobs and runs."""
        return self.name.rpartition(":")[2].lower()

    @property
    def main_output(self) -> str | None:
        """What `${out:STAGE.each}` lists of every member; None if nothing can be referred to."""
        return next(iter(self.outputs), None)


def _embeds(kind: "Kind") -> bool:
    return not kind.scores_pairs


def _reranks(kind: "Kind") -> bool:
    return kind.reranks


def _has_one_vector(kind: "Kind") -> bool:
    return kind.has_one_vector


def _is_one_model(kind: "Kind") -> bool:
    return kind.has_one_model


def _is_one_model_of_vectors(kind: "Kind") -> bool:
    return kind.has_one_model and kind.has_one_vector


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class _Later:
    """A function of a module that is imported when the function is called."""

    module: str
    function: str

    def __call__(self, *arguments: Any) -> Any:
        return _load(self.module, self.function)(*arguments)


def _builtin(name: str, topic: str, summary: str, options: str, *, paths: bool = True, **more: Any) -> Command:
    """A command of the package: `compose`, `run` and, with `paths`, `require_paths` of embedtrain/commands/NAME."""
    module = f"embedtrain.commands.{name}"
    if paths:
        more["require_paths"] = _Later(module, "require_paths")
    return Command(
        name=name,
        topic=topic,
        summary=summary,
        options=f"{module}:{options}",
        compose=_Later(module, "compose"),
        run=_Later(module, "run"),
        **more,
    )


# Of commands that write a directory, and of those that write a model directory.
_WRITES: dict[str, Any] = {"output": "output_dir"}
_MODEL: dict[str, Any] = {**_WRITES, "folder": "model", "outputs": {MODEL: "model"}}
_ROWS: dict[str, Any] = {**_WRITES, "outputs": {DATA: "*.jsonl"}}
COMMANDS = {
    command.name: command
    for command in (
        _builtin(
            "train",
            "train",
            "train a model; the same command resumes it",
            "Recipe",
            ranks=True,
            takes_recipe=True,
            saves_on_signal=True,
            resumes=True,
            output="output_dir",
            outputs={MODEL: "model", RUN: ""},
        ),
        _builtin(
            "plan",
            "train",
            "estimate memory, strategy and time before a GPU is booked",
            "PlanOptions",
            paths=False,
            takes_recipe=True,
        ),
        _builtin(
            "doctor",
            "train",
            "check whether this machine is ready for training",
            "DoctorOptions",
            paths=False,
            ranks=True,
        ),
        _builtin(
            "submit", "train", "submit a training to a cluster", "SubmitOptions", computes=False, takes_recipe=True
        ),
        _builtin(
            "report",
            "train",
            "write an HTML page about one run or several",
            "ReportOptions",
            paths=False,
            computes=False,
        ),
        _builtin(
            "inspect",
            "data",
            "show how data is read, cut and batched",
            "InspectOptions",
            paths=False,
            takes_recipe=True,
        ),
        _builtin(
            "split",
            "data",
            "hold out queries of training data as an evaluation set",
            "SplitOptions",
            computes=False,
            output="output_dir",
            outputs={DATA: "*.jsonl", "dev": "dev"},
        ),
        _builtin(
            "filter",
            "data",
            "keep the training rows whose positives rank high",
            "FilterOptions",
            ranks=True,
            resumes=True,
            takes={MODEL: _embeds},
            **_ROWS,
        ),
        _builtin(
            "mine",
            "data",
            "mine hard negatives for training data",
            "MineOptions",
            ranks=True,
            resumes=True,
            takes={MODEL: _embeds},
            **_ROWS,
        ),
        _builtin(
            "synthesize",
            "data",
            "write training rows for documents by a language model",
            "SynthesizeOptions",
            ranks=True,
            saves_on_signal=True,
            resumes=True,
            output="output_dir",
            outputs={DATA: "rows.jsonl"},
        ),
        _builtin(
            "vectors",
            "data",
            "compute a teacher's vectors of training data once",
            "VectorsOptions",
            ranks=True,
            resumes=True,
            takes={MODEL: _has_one_vector},
            folder="vectors",
            outputs={VECTORS: "vectors"},
            **_WRITES,
        ),
        _builtin(
            "pages",
            "data",
            "render the pages of PDF files as pictures",
            "PagesOptions",
            computes=False,
            resumes=True,
            output="output_dir",
            folder="pages",
            outputs={DATA: "pages/pages.jsonl"},
        ),
        _builtin(
            "evaluate",
            "evaluate",
            "measure a model on evaluation sets or MTEB",
            "EvaluateOptions",
            ranks=True,
            resumes=True,
            takes={MODEL: _embeds, "reranker.path": _reranks},
            **_WRITES,
        ),
        _builtin("search", "evaluate", "search a corpus with a model", "SearchOptions"),
        _builtin("verify", "evaluate", "compare the vectors of serving engines with those of a model", "VerifyOptions"),
        _builtin(
            "export",
            "models",
            "write a model directory from a checkpoint",
            "ExportOptions",
            resumes=True,
            **_MODEL,
        ),
        _builtin(
            "calibrate",
            "models",
            "prepare vectors for compression",
            "CalibrateOptions",
            ranks=True,
            resumes=True,
            takes={MODEL: _is_one_model_of_vectors},
            **_MODEL,
        ),
        _builtin(
            "merge",
            "models",
            "merge the weights of several models",
            "MergeOptions",
            ranks=True,
            **_MODEL,
        ),
        _builtin(
            "prune",
            "models",
            "make a smaller model from some of a model's layers",
            "PruneOptions",
            makes_smaller=True,
            takes={MODEL: _is_one_model},
            **_MODEL,
        ),
        _builtin(
            "trim",
            "models",
            "make a smaller model without the tokens that a corpus does not use",
            "TrimOptions",
            makes_smaller=True,
            takes={MODEL: _is_one_model},
            **_MODEL,
        ),
        _builtin(
            "static",
            "models",
            "make a static embedding model from a model",
            "StaticOptions",
            makes_smaller=True,
            ranks=True,
            takes={MODEL: _is_one_model_of_vectors},
            kind="dense",
            **_MODEL,
        ),
    )
}
# Those that can be stages of pipelines and be submitted to a cluster.
WRITING = tuple(name for name, command in COMMANDS.items() if command.output is not None)


def find_command(name: str, option: str = "command") -> Command | None:
    """The command of this name, or the one that `module:NAME` is; None if there is none of the name.

    Whoever calls this has made sure that the user has written the name, because it imports the module. Raises a
    ConfigError that names `option` if the module cannot be imported, or has something else of the name.
    """
    if name in COMMANDS or ":" not in name:
        return COMMANDS.get(name)
    from embedtrain.config.code import is_code_path, load_code

    if not is_code_path(name):
        return None
    command = load_code(name, option)
    if not isinstance(command, Command):
        raise ConfigError(f"{option}={name}: is {type(command).__name__}; write an embedtrain.config.commands.Command")
    return replace(command, name=name)
