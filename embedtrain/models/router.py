"""The modules of a sentence-transformers directory whose queries and documents take different routes (Router)."""

from pathlib import Path

from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import Module, module_at, read_modules
from embedtrain.models.static_queries import STATIC_EMBEDDING
from embedtrain.models.word_weights import SPLADE_POOLING, TRANSFORMERS

ROUTER, ROUTER_CONFIG = "Router", "router_config.json"


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
        or kinds["query"] != [STATIC_EMBEDDING]
        or kinds["document"] not in documents
    ):
        described = "; ".join(f"{route}: {', '.join(of_route)}" for route, of_route in kinds.items())
        raise ModelError(
            f"{path} has the routes {described or '(none)'}; supported are query: {STATIC_EMBEDDING}, and document: "
            f"{TRANSFORMERS[0]}, {SPLADE_POOLING}"
        )
    return [*routes["document"], *routes["query"]]
