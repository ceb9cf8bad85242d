"""Directories of sentence-transformers: modules and settings, read and written, and models that it opens from them.

Types of modules are matched against a list, and no class that a file names is imported.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from embedtrain.config.code import is_code_path
from embedtrain.config.kind_settings import SparseActivation, SparsePooling, StaticQueries, WordWeights
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError, ModelError
from embedtrain.formats.static_embedding import STATIC_EMBEDDING
from embedtrain.models.encoder import ACTIVATIONS, hidden_size
from embedtrain.models.file_references import read_json, require_own_files
from embedtrain.models.pooling import POOLING
from embedtrain.models.security import require_safe_files
from embedtrain.models.types import DenseSource, ModelSource
from embedtrain.utils.files import expand_user, write_json

SETTINGS = "config_sentence_transformers.json"
TASKS_FOLDER = "adapters"  # of a directory with the adapters of several tasks
# Values of `model_type` in it; of PyLate the second of late interaction.
CROSS_ENCODER, MULTI_VECTOR, PYLATE = "CrossEncoder", "MultiVectorEncoder", "ColBERT"
SPARSE = "SparseEncoder"
_POOLINGS = {mode.stored: pooling for pooling, mode in POOLING.items()}
_POOLING_FLAGS = {mode.flag: mode.stored for mode in POOLING.values()}
_POOLING_FLAGS["pooling_mode_mean_sqrt_len_tokens"] = "mean_sqrt_len_tokens"
OWN_POOLING = "pooling"  # the path of a user's class; its code runs only if the user names it as well
# What is read, and the dimension, which the model's configuration has as well.
POOLING_KEYS = frozenset(
    (*_POOLING_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension")
)
_SENTENCE, _SCORES = "sentence_embedding", "scores"  # what modules read and write
NORMALIZE_KEYS = frozenset(("module_input_name", "module_output_name"))
DENSE_KEYS = NORMALIZE_KEYS | {"in_features", "out_features", "bias", "activation_function", "use_residual"}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
LOGIT_SCORE = "LogitScore"
SPLADE_POOLING = "SpladePooling"
# The module before it: of sentence-transformers 6, and of version 5.
TRANSFORMERS = ("Transformer", "MLMTransformer")
SPARSE_STATIC_EMBEDDING = "SparseStaticEmbedding"
# Its folder in sentence-transformers' directories, and the weights in it.
QUERY_FOLDER = f"query_0_{SPARSE_STATIC_EMBEDDING}"
WEIGHTS = "model.safetensors"
ROUTER, ROUTER_CONFIG = "Router", "router_config.json"
_DENSE_MODULES = {"Transformer", STATIC_EMBEDDING, "Pooling", "Dense", "Normalize"}
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
TRANSFORMER_MODULE = "sentence_transformers.base.modules.transformer.Transformer"
# The oldest module names of sentence-transformers: every version from 2.2 on opens them.
OLD_MODULE = "sentence_transformers.models."
# Texts that it encodes at a time. It sorts them by length, but more of them would all be padded to the longest probe
# text; with one of them, padding would not be tested.
BATCH_SIZE = 2


OLD_CLIP = "CLIPModel"  # before version 5.4, the module of CLIP in a folder of its own, read as a Transformer


class Module(NamedTuple):
    """A module of a sentence-transformers directory."""

    kind: str  # the name of its class in sentence-transformers, or the full name of another class
    path: Path
    type: str  # the full name of the class


def read_modules(directory: Path) -> list[Module]:
    """The modules in modules.json. A ModelError if one is outside the directory."""
    modules: list[Module] = []
    for module in read_json(directory / "modules.json", list):
        if not isinstance(module, dict) or "type" not in module:
            raise ModelError(f"{directory / 'modules.json'} holds {module!r}, not a mapping with `type`")
        path = directory / str(module.get("path") or "")
        modules.append(module_at(directory, str(module["type"]), path, directory / "modules.json"))
    return modules


def module_at(directory: Path, kind: str, path: Path, settings: Path) -> Module:
    """The module with this class and folder, which the file `settings` names; ModelError if it is outside."""
    part = path.resolve()
    if not part.is_relative_to(directory.resolve()):
        raise ModelError(f"{settings} names {part}, outside its own directory")
    if part.is_dir():
        require_own_files(part, directory)
    name = kind.rsplit(".", 1)[-1] if kind.startswith("sentence_transformers.") else kind
    return Module(name, part, kind)


def read_transformer_settings(directory: Path) -> dict[str, Any]:
    """Settings that sentence-transformers adds to a backbone; old versions named the file after the architecture."""
    names = sorted(directory.glob("sentence_*_config.json"), key=lambda path: path.name != "sentence_bert_config.json")
    settings: dict[str, Any] = read_json(names[0]) if names else {}
    length = settings.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ModelError(f"{names[0]}: max_seq_length={length!r} is not a number of tokens")
    return settings


def read_truncate_dim(path: Path) -> int | None:
    """The option of this name that sentence-transformers reads from its settings."""
    value = read_json(path).get("truncate_dim") if path.is_file() else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelError(f"{path}: truncate_dim={value!r} is not a number of dimensions")
    return value


def read_similarity(
    settings: Mapping[str, Any], directory: Path, allowed: Sequence[VectorSimilarity]
) -> VectorSimilarity:
    """How sentence-transformers compares vectors according to its settings, by default as the first that is allowed.

    A ModelError for another one.
    """
    value, names = settings.get("similarity_fn_name"), [similarity.value for similarity in allowed]
    if value is not None and value not in names:
        raise ModelError(
            f"{directory / SETTINGS}: similarity_fn_name={value!r:.200} is not supported: allowed are "
            f"{', '.join(names)}"
        )
    return allowed[0] if value is None else VectorSimilarity(value)


def task_prompts(adapter: str | None) -> dict[str, str]:
    """The prompts of the task if the adapter is `DIR/adapters/TASK` of a directory with adapters of several tasks."""
    folder = expand_user(adapter or "").resolve()
    path = folder.parent.parent / SETTINGS
    if adapter is None or folder.parent.name != TASKS_FOLDER or not path.is_file():
        return {}
    saved = prompts_of(read_json(path), path)
    names = {role: f"{folder.name}_{role}" for role in ("query", "document")}
    return {role: saved[name] for role, name in names.items() if name in saved}


def prompts_of(settings: Mapping[str, Any], path: Path, roles: Sequence[str] = ("query", "document")) -> dict[str, str]:
    """The prompts in the settings of a directory, whose file is `path`; `roles` are those that have its default."""
    saved = settings.get("prompts") or {}
    if not isinstance(saved, dict):
        raise ModelError(f"{path}: prompts={saved!r} is not a mapping of names to prompts")
    prompts = {str(name): str(text) for name, text in saved.items() if text is not None}
    default = settings.get("default_prompt_name")
    if default and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name={default} is not one of the prompts {', '.join(prompts) or '(none)'}"
        )
    # Alternative names in sentence-transformers' encode_document.
    for name in ("passage", "corpus"):
        if name in prompts:
            prompts.setdefault("document", prompts[name])
    if default and prompts[default]:
        prompts = dict.fromkeys(roles, prompts[default]) | prompts
    return prompts


def require_known_keys(path: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ModelError for a setting of a module that is not known, and may change what it computes.

    A value that is empty, false or null switches nothing on.
    """
    for name in sorted(settings.keys() - set(known)):
        if settings[name]:
            raise ModelError(
                f"{path}: {name}={settings[name]!r:.80} is not known, and may change the vectors: a newer version of "
                "sentence-transformers may have written it"
            )


def require_embedding(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a module that does not change the embedding of a text, but something beside it.

    The last layer of a cross-encoder makes scores of the embedding.
    """
    for name in ("module_input_name", "module_output_name"):
        allowed = (_SENTENCE, _SCORES) if name == "module_output_name" else (_SENTENCE,)
        if settings.get(name) not in (None, *allowed):
            raise ModelError(f"{path}: {name}={settings[name]!r:.80} is not supported: only {_SENTENCE} is")


def read_pooling(path: Path) -> tuple[Pooling | str, bool]:
    """The pooling, and whether it includes the prompt's tokens."""
    settings = read_json(path)
    if isinstance(own := settings.get(OWN_POOLING), str) and is_code_path(own):
        return own, settings.get("include_prompt", True) is not False
    require_known_keys(path, settings, POOLING_KEYS)
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes = modes or [name for flag, name in _POOLING_FLAGS.items() if settings.get(flag)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{path} has the pooling {' + '.join(modes) or '(none)'}; supported are {', '.join(_POOLINGS)}"
        )
    pooling, include_prompt = _POOLINGS[modes[0]], settings.get("include_prompt", True) is not False
    if pooling is Pooling.weighted_mean and not include_prompt:
        raise ModelError(f"{path}: include_prompt=false is not supported with the pooling weightedmean")
    return pooling, include_prompt


def read_dense(directory: Path) -> DenseSource:
    """A Dense head; a ModelError if it is not supported."""
    settings = read_json(directory / "config.json")
    require_known_keys(directory / "config.json", settings, DENSE_KEYS)
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in ACTIVATIONS:
        raise ModelError(f"{directory / 'config.json'}: activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if settings.get("use_residual"):
        raise ModelError(f"{directory / 'config.json'}: use_residual=true is not supported in a Dense head")
    sizes = [settings.get("in_features"), settings.get("out_features")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(
            f"{directory / 'config.json'}: in_features and out_features must be positive integers, not {sizes}"
        )
    return DenseSource(
        directory=directory,
        num_in=sizes[0],
        num_out=sizes[1],
        bias=bool(settings.get("bias", True)),
        activation=activation,
    )


def read_word_weights(path: Path) -> WordWeights:
    """The settings of a SpladePooling module; a ModelError if a value is not supported."""
    settings: dict[str, Any] = read_json(path)
    try:
        return WordWeights(
            pooling=SparsePooling(settings.get("pooling_strategy", "max")),
            activation=SparseActivation(settings.get("activation_function", "relu")),
        )
    except ValueError as error:
        raise ModelError(f"{path}: {error}; supported are max and sum, relu and log1p_relu") from None


def require_sparse_modules(directory: Path, kinds: Sequence[str]) -> None:
    """A ModelError unless these are the modules of a sparse model."""
    if (
        list(kinds[1:]) not in ([SPLADE_POOLING], [SPLADE_POOLING, SPARSE_STATIC_EMBEDDING])
        or kinds[0] not in TRANSFORMERS
    ):
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; supported with {SPLADE_POOLING} is a "
            "Transformer before it, and nothing else"
        )


def read_static_embedding(folder: Path) -> StaticQueries:
    """The settings of a SparseStaticEmbedding module; a ModelError if its files are not safe, or not supported."""
    require_safe_files(folder, trust_remote_code=False)
    settings = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if settings.get("path") is not None:
        raise ModelError(
            f"{folder / 'config.json'}: path={settings['path']!r:.200} names another file; save the model with "
            "sentence-transformers, which writes the weights"
        )
    path = folder / WEIGHTS
    if not path.is_file() and any(folder.glob("*.bin")):
        raise ModelError(f"{path} is missing; save the model with sentence-transformers, which writes safetensors")
    # The directory of a run has no weights.
    return StaticQueries(path=path if path.is_file() else None, trained=not settings.get("frozen", False))


@dataclass
class DirectoryModules:
    """What the modules of a directory compute, and where the transformer is."""

    transformer: Path
    kinds: list[str] = field(default_factory=list)  # in the order of the modules
    pooling: Pooling | str | None = None
    pooling_directory: Path | None = None  # of the weights of a user's pooling
    include_prompt: bool = True
    normalize: bool = False
    dense: list[DenseSource] = field(default_factory=list)
    logit_score: dict[str, Any] = field(default_factory=dict)  # its settings
    words: WordWeights | None = None  # of a sparse model

    @property
    def is_static(self) -> bool:
        """Whether texts are means of rows of a table."""
        return STATIC_EMBEDDING in self.kinds

    @property
    def is_scorer(self) -> bool:
        """Whether a causal language model scores pairs by the logits of tokens."""
        return self.kinds == ["Transformer", LOGIT_SCORE]

    def require_supported(self, directory: Path) -> None:
        """Raise ModelError for an order of modules that none of our models has."""
        if self.words is not None:
            require_sparse_modules(directory, self.kinds)
            return
        first = [STATIC_EMBEDDING] if self.is_static else ["Transformer", *["Pooling"] * (self.pooling is not None)]
        if not self.is_scorer and self.kinds != [*first, *["Dense"] * len(self.dense), *["Normalize"] * self.normalize]:
            raise ModelError(
                f"{directory / 'modules.json'} has the modules {', '.join(self.kinds) or 'none'}; supported are "
                f"Transformer, Pooling (or {STATIC_EMBEDDING} alone), any number of Dense and an optional Normalize, "
                f"in this order, or Transformer and {LOGIT_SCORE}"
            )


def read_directory_modules(directory: Path, found: Sequence[Module] | None = None) -> DirectoryModules:
    """Read the settings of all modules, or of those that are `found`.

    Their types are matched against a list, never imported.
    """
    modules = DirectoryModules(transformer=directory)
    for kind, part, full_name in routed_modules(directory) if found is None else found:
        modules.kinds.append("Transformer" if kind == OLD_CLIP else kind)
        match kind:
            case "Transformer" | "MLMTransformer" | "CLIPModel":
                modules.transformer = part
            case "StaticEmbedding":
                modules.transformer, modules.pooling = part, Pooling.mean
            case "Pooling":
                modules.pooling, modules.include_prompt = read_pooling(part / "config.json")
                modules.pooling_directory = None if isinstance(modules.pooling, Pooling) else part
            case "Normalize":
                path = part / "config.json"  # if it is not the default
                settings = read_json(path) if path.is_file() and part != directory else {}
                require_known_keys(path, settings, NORMALIZE_KEYS)
                require_embedding(path, settings)
                modules.normalize = True
            case "Dense":
                require_embedding(part / "config.json", read_json(part / "config.json"))
                modules.dense.append(read_dense(part))
            case "LogitScore":
                modules.logit_score = read_json(part / "config.json")
            case "SpladePooling":
                modules.words = read_word_weights(part / "config.json")
            case "SparseStaticEmbedding":
                modules.words = replace(modules.words or WordWeights(), queries=read_static_embedding(part))
            case _:
                raise ModelError(
                    f"{directory / 'modules.json'} has the unknown module type {full_name}; supported are Transformer, "
                    f"{STATIC_EMBEDDING}, Pooling, Dense, Normalize, {LOGIT_SCORE} and {SPLADE_POOLING}, and no code "
                    "of a model directory is run"
                )
    return modules


def read_routes(directory: Path) -> dict[str, list[Module]]:
    """The modules of each route of a Router, by name, with those that modules.json has after it; empty without one.

    The route of texts that are neither queries nor documents has no effect here. Versions 5 and 6 of
    sentence-transformers have the same files.
    """
    modules = read_modules(directory)
    if not modules or modules[0].kind != ROUTER:
        return {}
    router, *shared = modules
    root = router.path
    # Older versions have the same content in config.json.
    path = root / (ROUTER_CONFIG if (root / ROUTER_CONFIG).is_file() else "config.json")
    settings = read_json(path)
    types, structure = settings.get("types"), settings.get("structure")
    if not isinstance(types, dict) or not isinstance(structure, dict):
        raise ModelError(f"{path} must have mappings `types` and `structure`")
    routes: dict[str, list[Module]] = {}
    for route, names in structure.items():
        if not isinstance(names, list) or not all(isinstance(name, str) and name in types for name in names):
            raise ModelError(f"{path}: structure.{route}={names!r:.200} is not a list of names in `types`")
        routes[route] = [module_at(directory, str(types[name]), root / name, path) for name in names] + shared
    return routes


def has_dense_routes(routes: Mapping[str, Sequence[Module]]) -> bool:
    """Whether queries and documents have a route each, and get a vector from the modules of a dense model."""
    kinds = {module.kind for modules in routes.values() for module in modules}
    return set(routes) == {"query", "document"} and all(routes.values()) and kinds <= _DENSE_MODULES


def routed_modules(directory: Path) -> list[Module]:
    """The modules in modules.json; of a Router, those of documents, and that of queries after them.

    A ModelError unless queries are static and documents are encoded by a sparse model.
    """
    routes = read_routes(directory)
    if not routes:
        return read_modules(directory)
    kinds = {route: [module.kind for module in modules] for route, modules in routes.items()}
    documents = [[transformer, SPLADE_POOLING] for transformer in TRANSFORMERS]
    if (
        set(kinds) != {"query", "document"}
        or kinds["query"] != [SPARSE_STATIC_EMBEDDING]
        or kinds["document"] not in documents
    ):
        described = "; ".join(f"{route}: {', '.join(of_route)}" for route, of_route in kinds.items())
        raise ModelError(
            f"{directory / ROUTER_CONFIG} has the routes {described or '(none)'}; supported are query: "
            f"{SPARSE_STATIC_EMBEDDING}, and document: {TRANSFORMERS[0]}, {SPLADE_POOLING}, or for both the modules of "
            "a model with one vector per text"
        )
    return [*routes["document"], *routes["query"]]


def write_modules(directory: Path, kinds: Mapping[str, str]) -> None:
    """Write modules.json, from the folders of the modules and their types."""
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(directory / "modules.json", entries)


def write_pooling(directory: Path, source: ModelSource) -> None:
    """Write the settings of the module Pooling."""
    pooling, include_prompt = source.vectors.pooling, {"include_prompt": source.vectors.include_prompt}
    if not isinstance(pooling, Pooling):
        write_json(directory / "config.json", {OWN_POOLING: pooling} | include_prompt)
        return
    flags = {mode.flag: kind is pooling for kind, mode in POOLING.items()}
    unused = {"pooling_mode_mean_sqrt_len_tokens": False}
    dimension = {"word_embedding_dimension": hidden_size(source.config)}
    write_json(directory / "config.json", dimension | flags | unused | include_prompt)


def load_model(class_name: str, directory: Path, source: ModelSource) -> Any:
    """The model of a directory as a class of sentence-transformers, in float32 on the CPU.

    Raises whatever the library raises.
    """
    import sentence_transformers  # only here, because it takes seconds

    return getattr(sentence_transformers, class_name)(
        str(directory),
        device="cpu",
        local_files_only=True,
        trust_remote_code=source.trust_remote_code,
        model_kwargs={"dtype": "float32"},
    )


@contextlib.contextmanager
def opening(directory: Path) -> Iterator[None]:
    """Turn an exception of the library into a CheckpointError that names the directory."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot open {directory}: {type(error).__name__}: {error}"
        ) from error
