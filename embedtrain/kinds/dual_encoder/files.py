"""Model directories of dual encoders, read and written: a Router of sentence-transformers, or two directories.

Each route of a Router that is written here is a directory of its own, which other software opens alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from embedtrain.config.kinds import Kind, load_kind
from embedtrain.config.recipe import ExportConfig, Pooling
from embedtrain.config.validation import model_option, tower_options_named
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.model_files import StoredName
from embedtrain.formats.sentence_transformers import (
    BATCH_SIZE,
    OLD_MODULE,
    ROUTER,
    ROUTER_CONFIG,
    WEIGHTS,
    load_model,
    opening,
    read_modules,
    read_routes,
    write_modules,
)
from embedtrain.formats.source import open_model_source
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.dense.files import DenseFiles, write_settings
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.kinds.dense.source import read as read_dense
from embedtrain.kinds.dense.vision import reads_pictures
from embedtrain.kinds.dual_encoder.options import ROLES, DualEncoderOptions, check_export_options, tower_options
from embedtrain.models.encoder import Encoder
from embedtrain.models.types import ModelSource, Towers, VectorSettings
from embedtrain.utils.files import write_json


def read(kind: Kind, directory: Path, model: DualEncoderOptions) -> ModelSource:
    """The towers of a Router in a directory, which has the prompts and the similarity."""
    routes, dense = read_routes(directory), load_kind("dense")

    def tower(role: str, options: DenseOptions) -> ModelSource:
        source = read_dense(dense, directory, options, routes[role])
        length = options.max_length or source.tokenization.max_length
        return replace(source, tokenization=replace(source.tokenization, max_length=length))

    return replace(_joined(kind, model, tower), directory=directory)


def assembled(kind: Kind, model: DualEncoderOptions) -> ModelSource:
    """Two models as towers; the prompt of queries is that of the first, all else that of the second."""
    source = _joined(kind, model, lambda _role, options: open_model_source(options))
    own = {"query": source.towers["query"].prompts.get("query", "")}
    return replace(source, prompts=source.prompts | own)


def _joined(kind: Kind, model: DualEncoderOptions, tower: Callable[[str, DenseOptions], ModelSource]) -> ModelSource:
    """The model of both towers; a ConfigError unless their vectors have the same dimension."""
    towers = dict[str, ModelSource]()
    for role in ROLES:
        options = tower_options(model, role)
        with tower_options_named(role):
            towers[role] = tower(role, options)
            if reads_pictures(towers[role]):
                raise ConfigError(
                    f"{towers[role].directory} is a vision-language model, which is no tower of a dual encoder; train "
                    "it alone, as model.kind=dense"
                )
            if not isinstance(pooling := towers[role].vectors.pooling, Pooling):
                raise ModelError(
                    f"{towers[role].directory}: is pooled by a class of the user, {pooling}, which no tower of a dual "
                    "encoder can be; train a model with a pooling of its own alone"
                )
    query, document = (towers[role] for role in ROLES)
    if query.dimension != document.dimension:
        larger, smaller = ("query", document) if query.dimension > document.dimension else ("document", query)
        if (option := model_option("path")) != "model.path":  # of a command, which has no options of towers
            raise ModelError(
                f"{option}={model.path}: has vectors of {query.dimension} dimensions of queries and of "
                f"{document.dimension} of documents, which cannot be compared"
            )
        raise ConfigError(
            f"model.query has vectors of {query.dimension} dimensions and model.document of {document.dimension}, and "
            f"both need the same: write model.{larger}.heads=[{{out: {smaller.dimension}}}]"
        )
    lengths = [source.tokenization.max_length for source in towers.values()]
    longest = None if None in lengths else max(length for length in lengths if length is not None)
    return ModelSource(
        kind=kind,
        directory=None,
        config=document.config,
        settings=Towers(towers),
        vectors=VectorSettings(
            normalize=all(source.vectors.normalize for source in towers.values()),
            include_prompt=all(source.vectors.include_prompt for source in towers.values()),
            similarity=model.similarity or document.vectors.similarity,
            truncate_dim=document.vectors.truncate_dim,
        ),
        tokenization=replace(document.tokenization, max_length=longest),
        prompts=document.prompts,
    )


class DualEncoderFiles(DenseFiles):
    """The folders `query` and `document`, each a model of sentence-transformers, and a Router to both."""

    plural = "dual encoders"
    description = (
        "A text-embedding model with {dimension} dimensions, of queries by one model and of documents by another, for "
        "texts of up to {max_length} tokens"
    )
    tags: ClassVar[Sequence[str]] = ("sentence-similarity", "feature-extraction", "asymmetric")
    encodes_plain_texts = False

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """The Router; its routes are written."""
        types, structure = dict[str, str](), dict[str, list[str]]()
        for role in ROLES:
            root = (directory / role).resolve()
            modules = {f"{role}/{module.path.relative_to(root)}": module for module in read_modules(root)}
            modules = {name.removesuffix("/."): module for name, module in modules.items()}
            types |= {name: OLD_MODULE + module.kind for name, module in modules.items()}
            structure[role] = list(modules)
        parameters = {"default_route": "document", "allow_empty_key": True, "route_mappings": {}}
        write_json(directory / ROUTER_CONFIG, {"types": types, "structure": structure, "parameters": parameters})
        write_modules(directory, {"": OLD_MODULE + ROUTER})
        write_settings(directory, source)

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """sentence-transformers, and the folders for software that opens one model."""
        return [
            *super().usage(name, prompts, architecture),
            "Queries and documents have a model each: `encode_query` computes one and `encode_document` the other. "
            "Software that opens one model, such as a serving engine, serves the folder `query` for queries and the "
            "folder `document` for documents, each a directory of sentence-transformers.",
            "",
        ]

    def check_export(self, config: ExportConfig, kind: str) -> None:
        """What has one tower cannot be written."""
        check_export_options(config)

    def model_folders(self, directory: Path) -> list[Path]:
        """Those of the towers."""
        return [directory / role for role in ROLES if (directory / role / "config.json").is_file()]

    def is_transformers(self, source: ModelSource) -> bool:
        """It opens a tower alone."""
        return False

    def is_sentence_transformers(self, source: ModelSource) -> bool:
        """As a Router."""
        return True

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """In the folders of the towers."""
        names, stored = list(names), dict[str, StoredName]()
        for role in ROLES:
            own = [name.removeprefix(f"{role}.") for name in names if name.startswith(f"{role}.")]
            for name, (key, file, is_float32) in DenseFiles().stored_names(own, architecture / role).items():
                stored[f"{role}.{name}"] = StoredName(key, f"{role}/{file or WEIGHTS}", is_float32)
        return stored

    def stored_shapes(self, source: ModelSource) -> dict[Path, dict[str, list[int]]]:
        """Those of the towers."""
        shapes = [tower.kind.files.stored_shapes(tower) for tower in source.towers.values()]
        return {folder: own for of_tower in shapes for folder, own in of_tower.items()}

    def probe(
        self, encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str], device: torch.device
    ) -> Tensor:
        """Vectors of the texts as queries and, below them, as documents, without prompts: [2 N, D]."""
        rows = []
        for role in TextRole:
            tokens = tokenizer.tokens(PROBES, role=role)
            with torch.no_grad():
                rows += [encoder(tokenizer.chunk(tokens, [row]).to(device))[0].cpu() for row in range(len(tokens))]
        return torch.cat(rows)

    def of_sentence_transformers(
        self, directory: Path, source: ModelSource, prompts: Mapping[str, str], max_length: int
    ) -> Tensor:
        """Vectors of SentenceTransformer by both routes; prompts are compared."""
        with opening(directory):
            model = load_model("SentenceTransformer", directory, source)
            options = {"prompt": "", "batch_size": BATCH_SIZE, "show_progress_bar": False, "convert_to_tensor": True}
            vectors = torch.cat([model.encode(list(PROBES), task=role, **options) for role in ROLES])
            stored = dict(model.prompts)
        for name, text in prompts.items():
            if stored.get(name) != text:
                raise CheckpointError(
                    f"sentence-transformers opens {directory} with the prompt {name}={stored.get(name)!r}, not {text!r}"
                )
        return torch.as_tensor(vectors).float().cpu()

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """A graph has one tower."""
        return {}
