"""Model directories that are made from a model without training: with fewer layers, or a smaller vocabulary."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from torch import Tensor

from embedtrain.checkpoint.tensor_files import TensorSpec
from embedtrain.config.recipe import ExportConfig, ModelConfig, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.formats.cross_encoder import compared_pairs
from embedtrain.formats.model_card import hub_id
from embedtrain.formats.model_directory import WeightStream, write_architecture
from embedtrain.formats.model_export import ExportResult, export_dtype, plan_export
from embedtrain.formats.replacement import export_lock
from embedtrain.formats.usage import TAGS, describe_model, pipeline_tag, usage
from embedtrain.formats.verify import PROBES, ExportReference, export_tolerance, probe_vectors
from embedtrain.models.build import assemble_encoder, build_encoder
from embedtrain.models.hub import resolve_directory, split_revision
from embedtrain.models.module_settings import stored_kind
from embedtrain.models.source import open_model_source
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console


@dataclass(frozen=True)
class DerivedModel:
    """A model that was made from another one."""

    source: ModelSource  # its settings; the directory is that of the original
    weights: Mapping[str, Tensor]  # by the encoder's names
    tokenizer: TextTokenizer
    original: str  # the model directory or Hub id that it was made from
    description: str  # for the model card, with {} for the name of the original


def open_model(
    path: str, revision: str | None, kind: str | None, pooling: Pooling | None, *, trust_remote_code: bool
) -> ModelSource:
    """A model directory or Hub id (ID@REVISION) of any kind, by default the kind of the directory."""
    name, own_revision = split_revision(path)
    revision = revision or own_revision
    kind = kind or stored_kind(resolve_directory(name, revision, "model", "revision"))
    return open_model_source(
        ModelConfig(path=name, revision=revision, kind=kind, pooling=pooling, trust_remote_code=trust_remote_code)
    )


def num_parameters(source: ModelSource) -> int:
    """The number of weights of the encoder."""
    return sum(parameter.numel() for parameter in build_encoder(source).parameters())


def write_derived(
    model: DerivedModel, output_dir: Path, config: ExportConfig, console: Console, *, trust_remote_code: bool
) -> ExportResult:
    """Write the directory, which replaces `output_dir` once it reproduces the outputs of the weights in memory.

    Raises CheckpointError if it does not.
    """
    source, tokenizer = model.source, model.tokenizer
    dtype = export_dtype(config.dtype, source)
    reference: ExportReference | None = None
    if config.check:
        with console.phase("encoding probe texts"):
            encoder = assemble_encoder(source)
            encoder.load_state_dict(dict(model.weights))
            reference = ExportReference(
                probe_vectors(encoder, tokenizer, source.prompts),
                export_tolerance(dtype, exact_encoder=True),
                source.prompts,
                tokenizer.max_length,
                compared=compared_pairs(tokenizer, PROBES, source.prompts),
            )
    with export_lock(output_dir) as unfinished, tempfile.TemporaryDirectory() as folder:
        architecture = Path(folder) / "architecture"
        write_architecture(architecture, source, tokenizer)
        specs = {name: TensorSpec.of(value) for name, value in model.weights.items()}
        stream = WeightStream(specs, ((name, 0, value) for name, value in model.weights.items()))
        export = plan_export(output_dir, unfinished, architecture, stream, dtype, config)
        with console.phase("writing the directory"):
            export.begin()
            export.write(stream.rows, main=True)
        card = _card(model, output_dir.name, config.truncate_dim or source.dimension, architecture)
        result = export.finish(card, reference, trust_remote_code=trust_remote_code, phase=console.phase)
    console.note(f"model: {result.directory} ({result.describe()})")
    for note in result.notes:
        console.note(note)
    return result


def _card(model: DerivedModel, title: str, dimension: int, architecture: Path) -> str:
    """README.md of the model."""
    kind, base = model.source.kind.name, hub_id(split_revision(model.original)[0])
    metadata = {
        "base_model": base,
        "library_name": "sentence-transformers",
        "pipeline_tag": pipeline_tag(kind),
        "tags": ["sentence-transformers", *TAGS[kind], "embedtrain"],
    }
    header = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False).strip()
    described = describe_model(kind, dimension=dimension, max_length=model.tokenizer.max_length)
    lines = [
        *("---", header, "---", f"# {title}", ""),
        f"{described}: {model.description.format(base or 'a larger model')}",
        "",
        *usage(kind, "path/of/this/directory", model.source.prompts, architecture),
    ]
    return "\n".join(lines)
