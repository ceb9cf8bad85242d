"""`torchrun -m embedtrain calibrate model=DIR data=PATH output_dir=DIR`: an affine head and ranges for a model."""

import glob
import hashlib
import os
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.config.command_options import (
    DataOptions,
    DimsOptions,
    DocumentOptions,
    KindOptions,
    ModelOptions,
    OutputOptions,
    PoolingOptions,
    PrecisionOptions,
    RankOptions,
    ShardOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_corpus
from embedtrain.config.paths import require_models, require_sources
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.files import expand_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from embedtrain.distributed.world import World
    from embedtrain.formats.source import CommandModel
    from embedtrain.inference.loading.load import LoadedModel
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.console import Console


HELP = f"""embedtrain calibrate: prepare a model's vectors for compression

  embedtrain calibrate model=DIR data=PATH output_dir=DIR [option=value ...]

PATH: a BEIR folder, a file of documents, or training rows, whose documents are
used. Nothing is trained.

{{options: model! data! output_dir! head dims documents ranges precision}}

{LAUNCH_HELP}

The new directory has a further Dense module, which every library applies, and
quantisation.json with the ranges of int8 and uint8."""


class CalibrationHead(str, Enum):
    """The affine head that is added to the model.

    `pca`: subtracts the mean vector and rotates to the principal components, the first ones first. `mean`: subtracts
    the mean vector. `none`: no head, only ranges.
    """

    pca = "pca"
    mean = "mean"
    none = "none"


@dataclass(kw_only=True)
class CalibrateOptions(
    RankOptions,
    PrecisionOptions,
    ShardOptions,
    DimsOptions,
    OutputOptions,
    DocumentOptions,
    DataOptions,
    PoolingOptions,
    KindOptions,
    ModelOptions,
):
    """Options of `python -m embedtrain calibrate`."""

    head: CalibrationHead = CalibrationHead.pca
    documents: int = option(10000, at_least=2)  # at most so many are encoded: a fixed sample
    ranges: list[int] = field(default_factory=list)  # also write ranges of so many first dimensions, as [256,128]


def _check_use(options: CalibrateOptions) -> None:
    OptionChecks(options).require(
        options.dims is None or options.head is CalibrationHead.pca, "dims", "is for head=pca; leave it out"
    )


def compose(arguments: list[str]) -> CalibrateOptions:
    """The options, checked."""
    options = compose_command("calibrate", CalibrateOptions, arguments, HELP, _check_use)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    options.data = parse_corpus(options.data, "data")
    needed = "must be the path of a BEIR folder, of documents or of training rows, or a list of such paths"
    check.require(bool(options.data), "data", needed)
    check.require(bool(options.output_dir), "output_dir", "is missing; write the new model directory")
    is_valid = min(options.ranges, default=1) >= 1 and len(set(options.ranges)) == len(options.ranges)
    check.require(is_valid, "ranges", "must be different numbers of dimensions above 0, such as [256,128]")
    return options


def require_paths(options: CalibrateOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)
    # No path can be an id on the Hub.
    require_sources((), [replace(each, path=str(expand_user(each.path).absolute())) for each in options.data])


def run(options: CalibrateOptions) -> Path:
    """Encode a sample of documents on all ranks, and write the directory on rank 0; returns it."""
    from embedtrain.commands.calibrate.head import (
        fit_head,
        ranges_of,
        require_copyable,
        require_stored_pooling,
        write_directory,
    )
    from embedtrain.distributed.world import joined_world
    from embedtrain.formats.export_record import export_lock, replace_export, require_replaceable
    from embedtrain.formats.hub import resolve_directory
    from embedtrain.formats.source import CommandModel
    from embedtrain.formats.weights import weights_digest
    from embedtrain.inference.loading.command_model import load_encoder_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        output_dir = Path(options.output_dir)
        with world.fail_together("checking output_dir"):
            if world.is_main:
                output_dir = require_replaceable(output_dir, expand_user(options.model))
                _require_outside(output_dir, options.model)
        texts = _sampled_texts(options, world)
        config = CommandModel(
            path=options.model,
            kind=options.kind or "",
            pooling=options.pooling,
            normalize=False,  # the head comes before the normalisation
            revision=options.revision,
            max_length=options.max_length,
            document_prompt=options.document_prompt,
            trust_remote_code=options.trust_remote_code,
        )
        with world.fail_together("looking at the files of the model"):
            root = resolve_directory(options.model, options.revision, "model", "revision")
            require_copyable(root)

        def check(source: "ModelSource") -> None:
            source.require_one_tower(f"model={options.model}")
            _check_model(options, source, texts)
            require_stored_pooling(source, root)

        with console.phase("loading the model"):
            model = load_encoder_model(config, options.precision, world, check=check)
        num_out = options.dims or model.source.dimension
        vectors = _encode(options, model, texts, world, console)
        with console.phase("writing the directory"), world.fail_together("writing the directory"):
            if world.is_main:
                head = None
                if options.head is not CalibrationHead.none:
                    head = fit_head(vectors, options.dims, rotates=options.head is CalibrationHead.pca)
                outputs = vectors if head is None else head.apply(vectors)
                prepare = _prepared(config, model.source)
                ranges = {size: ranges_of(prepare(outputs, size)) for size in dict.fromkeys((num_out, *options.ranges))}
                digest = hashlib.blake2b("\0".join(texts).encode(errors="replace"), digest_size=16).hexdigest()
                origin = {"model": weights_digest(model.source), "texts": digest, "documents": len(texts)}
                origin |= {"head": options.head.value}
                with export_lock(output_dir) as unfinished:
                    kind, trusted = model.source.kind, options.trust_remote_code
                    write_directory(unfinished, root, head, ranges, origin, kind=kind, trust_remote_code=trusted)
                    replace_export(output_dir, unfinished)
                if head is not None:
                    console.note(
                        f"head: {options.head.value}, {model.source.dimension} to {num_out} dimensions with "
                        f"{head.explained:.1%} of the variance of {len(texts):,} documents"
                    )
        console.note(f"model: {output_dir}")
        return output_dir


def _check_model(options: CalibrateOptions, source: "ModelSource", texts: list[str]) -> None:
    """A ConfigError if the model has no such vectors, or the sample is too small."""
    from embedtrain.commands.calibrate.head import require_calibratable
    from embedtrain.config.evaluation import check_kind_of_vectors
    from embedtrain.config.validation import OptionChecks

    check_kind_of_vectors(source.kind, "model")
    require_calibratable(source, options.model)
    source.require_inner_products("model")
    dimension, check = source.dimension, OptionChecks(options)
    check.require((options.dims or 1) <= dimension, "dims", f"the vectors have {dimension} dimensions")
    num_out = options.dims or dimension
    check.require(max(options.ranges, default=1) <= num_out, "ranges", f"the vectors have {num_out} dimensions")
    check.require(len(texts) > 1, "data", "has fewer than two documents")


def _prepared(config: "CommandModel", source: "ModelSource") -> "Callable[[Tensor, int], Tensor]":
    """What compares so many first dimensions of the vectors of the new directory, which may normalise all of them."""
    from embedtrain.inference.exact import unit_vectors
    from embedtrain.inference.loading.command_model import open_encoder_source

    prepare = source.kind.score(source).search_rows
    if (
        source.vectors.similarity is VectorSimilarity.dot
        and open_encoder_source(replace(config, normalize=None))[1].vectors.normalize
    ):
        return lambda vectors, size: prepare(unit_vectors(vectors), size)
    return prepare


def _require_outside(output_dir: Path, model: str) -> None:
    """A ConfigError for a folder inside the model's directory, which would become part of its own copy."""
    directory = expand_user(model)
    if directory.is_dir() and output_dir.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"output_dir={output_dir} is inside {directory}, which is copied: name a folder outside of it"
        )


def _sampled_texts(options: CalibrateOptions, world: "World") -> list[str]:
    """The distinct documents that are encoded, in their order."""
    from embedtrain.evaluation.readers.retrieval import read_any_corpus
    from embedtrain.inference.quantised import sampled_rows

    texts: list[str] = []
    with world.fail_together("reading documents"):
        for written in options.data:
            path = os.path.expanduser(written.path)
            matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.lexists(path) else [path]
            if not matches:
                raise DataError(f"data={written.path}: no file has such a name")
            for match in matches:
                texts += read_any_corpus(Path(match), pictures=written).texts
    texts = list(dict.fromkeys(texts))
    return [texts[number] for number in sampled_rows(len(texts), options.documents).nonzero().flatten().tolist()]


def _encode(
    options: CalibrateOptions, model: "LoadedModel", texts: list[str], world: "World", console: "Console"
) -> "Tensor":
    from embedtrain.data.types import TextRole
    from embedtrain.inference.encode import SentenceEncoder

    encoder = SentenceEncoder.from_model(
        model, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard, truncate=False
    )
    prompt, label = encoder.document_prompt, "encoding documents"
    with (
        console.phase(f"encoding {len(texts):,} documents"),
        console.progress() as progress,
        encoder.report_progress(progress),
    ):
        return encoder.encode_all(texts, prompt, role=TextRole.document, label=label)
