"""Export a small model without training it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embedtrain.checkpoint.tensor_files import TensorSpec
from embedtrain.config.recipe import ExportConfig, ModelConfig
from embedtrain.formats.export import ExportResult, plan_export
from embedtrain.formats.export_record import export_lock
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.verify import ExportReference, export_tolerance, probe_outputs
from embedtrain.formats.weights import WeightStream, write_architecture
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.types import ModelSource


@dataclass(frozen=True)
class Architecture:
    """A directory without weights, the weights, and the encoder's embeddings of the probes."""

    directory: Path
    source: ModelSource
    state: dict[str, torch.Tensor]
    vectors: torch.Tensor
    max_length: int


def architecture_of(directory: Path, model: ModelConfig) -> Architecture:
    """The architecture of a source, its weights, and its embeddings of the probes."""
    source = open_model_source(model)
    tokenizer = bound_tokenizer(source, load_tokenizer(source))
    state = full_state_dict(source, seed=0)
    write_architecture(directory, source, tokenizer)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(state)
    return Architecture(directory, source, state, probe_outputs(encoder, source, tokenizer), tokenizer.max_length)


def export_model(
    to: Path,
    built: Architecture,
    *,
    dtype: torch.dtype = torch.float32,
    card: str = "",
    in_bf16: bool = False,
    tolerance: float | None = None,
    **requested: Any,
) -> ExportResult:
    """Export unsharded weights of this process; options as in a recipe. `in_bf16`: the embeddings were computed so.

    `tolerance` is the limit before it is raised; by default that of exports.
    """
    options = ExportConfig(**requested)
    specs = {name: TensorSpec.of(tensor) for name, tensor in built.state.items()}
    rows = ((name, 0, tensor) for name, tensor in built.state.items())
    expected = ExportReference(
        built.vectors,
        tolerance or export_tolerance(dtype, exact_encoder=not in_bf16),
        {"query": ""} | built.source.prompts,
        built.max_length,
    )
    with export_lock(to) as unfinished:
        export = plan_export(to, unfinished, built.directory, WeightStream(specs, rows), dtype, options)
        export.begin()
        export.write(rows, main=True)
        return export.finish(
            card,
            expected if options.check else None,
            trust_remote_code=built.source.trust_remote_code,
            bf16_tokenizer=bound_tokenizer(built.source, load_tokenizer(built.source)) if in_bf16 else None,
        )
