"""The modules of a sentence-transformers directory, whose queries and documents may take different routes (Router)."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import Pooling
from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import (
    NORMALIZE_KEYS,
    DenseSource,
    Module,
    module_at,
    read_dense,
    read_modules,
    read_pooling,
    require_embedding,
    require_known_keys,
)
from embedtrain.models.score_head import LOGIT_SCORE
from embedtrain.models.static_embedding import STATIC_EMBEDDING
from embedtrain.models.static_queries import SPARSE_STATIC_EMBEDDING, read_static_embedding
from embedtrain.models.word_weights import (
    SPLADE_POOLING,
    TRANSFORMERS,
    WordWeights,
    read_word_weights,
    require_sparse_modules,
)

ROUTER, ROUTER_CONFIG = "Router", "router_config.json"


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


def read_directory_modules(directory: Path) -> DirectoryModules:
    """Read the settings of all modules. Their types are matched against a list, never imported."""
    modules = DirectoryModules(transformer=directory)
    for kind, part, full_name in routed_modules(directory):
        modules.kinds.append(kind)
        match kind:
            case "Transformer" | "MLMTransformer":
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


def routed_modules(directory: Path) -> list[Module]:
    """The modules in modules.json; of a Router, those of documents, and that of queries after them.

    A ModelError unless queries are static and documents are encoded by a sparse model. The route of other texts has no
    effect here. Versions 5 and 6 of sentence-transformers have the same files.
    """
    modules = read_modules(directory)
    if [module.kind for module in modules] != [ROUTER]:
        return modules
    root = modules[0].path
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
        routes[route] = [module_at(directory, str(types[name]), root / name, path) for name in names]
    kinds = {route: [module.kind for module in modules] for route, modules in routes.items()}
    documents = [[transformer, SPLADE_POOLING] for transformer in TRANSFORMERS]
    if (
        set(kinds) != {"query", "document"}
        or kinds["query"] != [SPARSE_STATIC_EMBEDDING]
        or kinds["document"] not in documents
    ):
        described = "; ".join(f"{route}: {', '.join(of_route)}" for route, of_route in kinds.items())
        raise ModelError(
            f"{path} has the routes {described or '(none)'}; supported are query: {SPARSE_STATIC_EMBEDDING}, and "
            f"document: {TRANSFORMERS[0]}, {SPLADE_POOLING}"
        )
    return [*routes["document"], *routes["query"]]
