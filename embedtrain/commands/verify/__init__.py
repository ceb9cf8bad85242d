"""`python -m embedtrain verify model=DIR`: whether libraries and serving engines compute the output of a model."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from embedtrain.config.command_options import KindOptions, ModelPathOptions, PoolingOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.options import option
from embedtrain.config.paths import require_models
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.utils.files import expand_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embedtrain.commands.verify.engines import Outcome


# The engines, in the order of the table. A name is that of the package that the program imports.
VERIFIED = (
    "sentence_transformers",
    "transformers",
    "onnxruntime",
    "fastembed",
    "transformers_js",
    "vllm",
    "llama_cpp",
    "infinity_emb",
    "FlagEmbedding",
    "langchain_huggingface",
    "llama_index",
    "haystack",
    "chromadb",
    "txtai",
    "pylate",
    "colpali_engine",
)
HELP = """embedtrain verify: whether libraries and servers compute what a model computes

  embedtrain verify model=DIR
  embedtrain verify model=DIR python='{fastembed: ENVIRONMENT/bin/python}'

{options: model! engines python tolerance}"""


@dataclass(kw_only=True)
class VerifyOptions(PoolingOptions, KindOptions, ModelPathOptions):
    """Options of `python -m embedtrain verify`."""

    # Of sentence_transformers, transformers, onnxruntime, fastembed, transformers_js, vllm, llama_cpp, infinity_emb,
    # FlagEmbedding, langchain_huggingface, llama_index, haystack, chromadb, txtai, pylate, colpali_engine; default:
    # those that are installed here, and those of `python`.
    engines: list[str] | None = None
    # The interpreters of engines that are installed elsewhere: {fastembed: ENVIRONMENT/bin/python}; of transformers_js
    # the folder of node_modules, with node in PATH.
    python: Any = None
    # largest difference of a number that passes, relative to numbers above 1
    tolerance: float = option(1e-4, above=0)


def compose(arguments: list[str]) -> VerifyOptions:
    """The options, checked."""
    require_single_process("verify")
    options = compose_command("verify", VerifyOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory")
    are_known = all(engine in VERIFIED for engine in options.engines or ())
    check.require(are_known, "engines", f"must be of {', '.join(VERIFIED)}")
    python = options.python or {}
    is_mapping = isinstance(python, dict) and all(isinstance(path, str) for path in python.values())
    check.require(
        is_mapping and python.keys() <= set(VERIFIED),
        "python",
        f"must be a mapping of {', '.join(VERIFIED)}, such as {{fastembed: ENVIRONMENT/bin/python}}",
    )
    return options


def require_paths(options: VerifyOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)


def run(options: VerifyOptions) -> list["Outcome"]:
    """Encode probe texts, or score pairs, with the model and with each engine, one after the other.

    Prints the differences. Raises CheckpointError if an engine cannot run, or computes something else.
    """
    from embedtrain.commands.verify.engines import probe_model, run_engine
    from embedtrain.distributed.world import joined_world
    from embedtrain.formats.serving import SERVING_ENGINES, ServedModel
    from embedtrain.formats.source import CommandModel
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    directory, console = expand_user(options.model).absolute(), Console()
    if not directory.is_dir():
        raise ModelError(f"model={options.model} is not a directory: export the model, or download it first")
    pythons = interpreters(options)
    quiet_libraries()
    with joined_world() as world, console.phase("encoding with the encoder"):
        config = CommandModel(path=str(directory), kind=options.kind or "", pooling=options.pooling)
        probe = probe_model(config, world)
    outcomes, served = [], ServedModel.open(directory, probe.source)
    for engine, python in pythons.items():
        reasons = SERVING_ENGINES[engine].reasons_against(served)
        if engine == "sentence_transformers" and python == sys.executable:
            missing = probe.source.kind.files.missing_packages(probe.source)
            reasons = [*reasons, *[f"it needs {' and '.join(missing)} to open this model"] * bool(missing)]
        if reasons:
            console.note(f"{engine}: not compared, {'; '.join(reasons)}")
            continue
        with console.phase(f"encoding with {engine}"):
            outcome = run_engine(engine, python, probe)
        known = SERVING_ENGINES[engine].known_differences(served)
        console.note(_describe(outcome, options.tolerance, known))
        outcomes += [outcome] if outcome.is_supported else []
    failed = [outcome.engine for outcome in outcomes if not outcome.passes(options.tolerance)]
    if failed:
        raise CheckpointError(f"{', '.join(failed)}: not the output of the model (tolerance={options.tolerance})")
    return outcomes


def interpreters(options: VerifyOptions) -> dict[str, str]:
    """The Python, or folder, of each engine to run; a ConfigError for one that is not installed."""
    from embedtrain.commands.verify.engines import NODE_CLIENTS

    installed = {name: sys.executable for name in VERIFIED if find_spec(name) is not None} | (options.python or {})
    if options.engines is None:
        return {name: installed[name] for name in VERIFIED if name in installed}
    for name in options.engines:
        if name not in installed:
            value = "FOLDER" if name in NODE_CLIENTS else "ENVIRONMENT/bin/python"
            raise ConfigError(f"engines has {name}, which is not installed here; write python={{{name}: {value}}}")
    return {name: installed[name] for name in options.engines}


def _describe(outcome: "Outcome", tolerance: float, known: "Sequence[str]") -> str:
    if not outcome.is_supported:
        return f"{outcome.engine} {outcome.version}: not compared, {outcome.reason}"
    if outcome.differences is None:
        return f"{outcome.engine}: failed, {outcome.reason}"
    roles = ", ".join(f"{role} {value:.1e}" for role, value in outcome.differences.items())
    verdict = "equal" if outcome.passes(tolerance) else "DIFFERENT"
    reasons = [] if outcome.passes(tolerance) else [*known]
    if outcome.changes:
        reasons += [f"without texts that it changes: it {outcome.changes}"]
    notes = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{outcome.engine} {outcome.version}: {verdict}, largest difference {roles}, allowed {tolerance:.0e}{notes}"
