"""`python -m embedtrain.verify model=DIR`: whether libraries and serving engines compute the vectors of a model."""

from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.cli import run_command
from embedtrain.config.paths import require_models
from embedtrain.errors import CheckpointError, ModelError
from embedtrain.verify.options import VerifyOptions, compose_verify

if TYPE_CHECKING:  # keeps `--help` free of torch
    import numpy as np
    from numpy.typing import NDArray

    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.models.types import ModelSource
    from embedtrain.verify.engines import Outcome


def compose(arguments: list[str]) -> VerifyOptions:
    """The options, checked, of a directory that exists."""
    options = compose_verify(arguments)
    require_models(model=options.model)
    return options


def main(options: VerifyOptions) -> list["Outcome"]:
    """Encode probe texts with the encoder and with each engine, one after the other; print the differences.

    Raises CheckpointError if an engine cannot run, or computes other vectors.
    """
    from embedtrain.checkpoint.export.verify import PROBES
    from embedtrain.config.recipe import ModelConfig, ModelKind, Precision
    from embedtrain.distributed.world import joined_world
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.loading.encoder_model import load_encoder_model
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.models.module_settings import stored_kind
    from embedtrain.tracking.console import Console
    from embedtrain.verify.engines import interpreters, run_engine, unsupported

    directory, console = Path(options.model).expanduser().absolute(), Console()
    if not directory.is_dir():
        raise ModelError(f"model={options.model} is not a directory: export the model, or download it first")
    if stored_kind(directory) is not ModelKind.dense:
        raise ModelError(f"{directory} is no model of one vector per text, which are those that verify compares")
    pythons = interpreters(options)
    quiet_libraries()
    with joined_world() as world:
        with console.phase("loading the model"):
            model = load_encoder_model(ModelConfig(path=str(directory)), Precision.fp32, world)
        encoder = SentenceEncoder.from_model(model, world, chunk_tokens=16384)
        texts = [text for text in ("", *PROBES) if model.tokenizer.ids([text])[0]]
        expected = _vectors(encoder, model.source, texts)
    outcomes = []
    for engine, python in pythons.items():
        if (reason := unsupported(engine, model.source, directory)) is not None:
            console.note(f"{engine}: not compared, {reason}")
            continue
        with console.phase(f"encoding with {engine}"):
            outcomes.append(run_engine(engine, python, directory, texts, expected))
        console.note(_describe(outcomes[-1], options.tolerance))
    failed = [outcome.engine for outcome in outcomes if not outcome.passes(options.tolerance)]
    if failed:
        raise CheckpointError(f"{', '.join(failed)}: not the vectors of the model (tolerance={options.tolerance})")
    return outcomes


def _vectors(encoder: "SentenceEncoder", source: "ModelSource", texts: list[str]) -> dict[str, "NDArray[np.float32]"]:
    """The encoder's vectors by way of encoding, truncated as the directory says."""
    from embedtrain.data.types import TextRole

    prompts = {"text": "", "query": source.prompts.get("query", ""), "document": source.prompts.get("document", "")}
    vectors = {}
    for role, prompt in prompts.items():
        text_role = TextRole.query if role == "query" else TextRole.document
        part = encoder.encode(texts, prompt, role=text_role, label=f"encoding with the encoder ({role})")
        vectors[role] = part.values[:, : source.truncate_dim].cpu().numpy()
    return vectors


def _describe(outcome: "Outcome", tolerance: float) -> str:
    if outcome.differences is None:
        return f"{outcome.engine}: failed, {outcome.reason}"
    roles = ", ".join(f"{role} {value:.1e}" for role, value in outcome.differences.items())
    verdict = "equal" if outcome.passes(tolerance) else "DIFFERENT"
    return f"{outcome.engine} {outcome.version}: {verdict}, largest difference {roles}"


if __name__ == "__main__":
    run_command(compose, main)
