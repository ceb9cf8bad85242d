"""Options of `python -m embedtrain verify`."""

from dataclasses import dataclass
from typing import Any

from embedtrain.config.compose import compose_command
from embedtrain.config.validation import OptionChecks, require_single_process

# The engines, in the order of the table. A name is that of the package that a program in clients/ imports.
ENGINES = (
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
)
HELP = """embedtrain verify: whether libraries and servers compute what a model computes

  embedtrain verify model=DIR
  embedtrain verify model=DIR python='{fastembed: ENVIRONMENT/bin/python}'

{options: model! engines python tolerance}"""


@dataclass(kw_only=True)
class VerifyOptions:
    """Options of `python -m embedtrain verify`."""

    model: str = ""  # model directory
    # Of sentence_transformers, transformers, onnxruntime, fastembed, transformers_js, vllm, llama_cpp, infinity_emb,
    # FlagEmbedding, langchain_huggingface, llama_index, haystack, chromadb, txtai, pylate; default: those that are
    # installed here, and those of `python`.
    engines: list[str] | None = None
    # The interpreters of engines that are installed elsewhere: {fastembed: ENVIRONMENT/bin/python}; of transformers_js
    # the folder of node_modules, with node in PATH.
    python: Any = None
    tolerance: float = 1e-4  # largest difference of a number that passes, relative to numbers above 1


def compose(arguments: list[str]) -> VerifyOptions:
    """The options, checked."""
    require_single_process("verify")
    options = compose_command("verify", VerifyOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory")
    are_known = all(engine in ENGINES for engine in options.engines or ())
    check.require(are_known, "engines", f"must be of {', '.join(ENGINES)}")
    python = options.python or {}
    is_mapping = isinstance(python, dict) and all(isinstance(path, str) for path in python.values())
    check.require(
        is_mapping and python.keys() <= set(ENGINES),
        "python",
        f"must be a mapping of {', '.join(ENGINES)}, such as {{fastembed: ENVIRONMENT/bin/python}}",
    )
    check.require(options.tolerance > 0, "tolerance", "must be a number above 0")
    return options
