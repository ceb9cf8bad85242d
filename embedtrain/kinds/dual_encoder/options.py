"""Options of model.kind=dual_encoder."""

from dataclasses import dataclass, field, fields

from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.options import option
from embedtrain.config.recipe import ADAPTER, POOLINGS, ExportConfig, ModelConfig
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError
from embedtrain.kinds.dense.options import DenseOptions

ROLES = ("query", "document")
# Options of a model with one tower.
_UNSUPPORTED = (
    *("config", "tokenizer", "tokenizer_revision", "bidirectional", "rope_theta", "rope_scaling"),
    "trust_remote_code",
)


@dataclass(kw_only=True)
class TowerOptions:
    """A tower: a model of one vector per text."""

    path: str | None = option(None, is_input=True)  # Hub id, Hugging Face directory or sentence-transformers directory
    revision: str | None = None  # a commit, tag or branch of the Hub repository
    # `cls`, `mean`, `last`, `max` or `weighted_mean`; default: that of a sentence-transformers directory
    pooling: str | None = None
    normalize: bool | None = None  # default: model.normalize, or that of the directory, else true
    # new dense heads between pooling and normalisation, for a tower that has none: both need the same dimensions
    heads: list[HeadConfig] = field(default_factory=list)
    max_length: int | None = None  # tokens, including special tokens; default: model.max_length, or the directory's
    append_eos: bool | None = None  # end every text with the end-of-text token; default: true with pooling `last`
    include_prompt: bool | None = None  # include the prompt in mean pooling; default: that of the directory, else true


@dataclass(kw_only=True)
class DualEncoderOptions(ModelConfig):
    """A vector per text, of queries by one model and of documents by another (asymmetric retrieval)."""

    kind: str = "dual_encoder"
    # The tower of queries, unless model.path has both (a Router of sentence-transformers), whose options these replace.
    query: TowerOptions = field(default_factory=TowerOptions)
    document: TowerOptions = field(default_factory=TowerOptions)  # the tower of documents
    normalize: bool | None = None  # L2-normalize embeddings of both, unless a tower has its own
    # How vectors are compared in evaluation, mining and search, and in the exported model: cosine, dot, euclidean or
    # manhattan. Default: as the loss compares them unless they are normalised, else that of the directory, else cosine.
    similarity: VectorSimilarity | None = None


def check_dual_encoder(model: DualEncoderOptions) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    check, defaults = OptionChecks(model, "model."), DualEncoderOptions()
    for name in _UNSUPPORTED:
        check.require(
            getattr(model, name) == getattr(defaults, name),
            name,
            "is not supported with two towers (model.kind=dual_encoder); leave it out",
        )
    if model.lora.path is not None:
        raise ConfigError(
            f"model.lora.path={model.lora.path}: is the adapter of one model, and model.kind=dual_encoder has two; "
            "write model.lora.rank for new adapters"
        )
    for role in ROLES:
        tower: TowerOptions = getattr(model, role)
        if tower.path is None and model.path is None:
            raise ConfigError(
                f"model.{role}.path is missing: write the path or Hub id of the tower that encodes "
                f"{'queries' if role == 'query' else 'documents'}, or model.path for a directory with both (a Router)"
            )
        if tower.path is not None and model.path is not None:
            raise ConfigError(
                f"model.path and model.{role}.path={tower.path} are both set: the first has both towers; keep one"
            )
        if tower.pooling is not None and tower.pooling not in POOLINGS:
            raise ConfigError(f"model.{role}.pooling={tower.pooling}: expected one of {', '.join(POOLINGS)}")
        tower_check = OptionChecks(tower, f"model.{role}.")
        tower_check.length("max_length")
        tower_check.require(
            tower.revision is None or tower.path is not None,
            "revision",
            f"chooses a version of a Hub repository; set model.{role}.path to its id",
        )
        tower_check.require(
            tower.include_prompt is not False or tower.pooling in (None, "mean"),
            "include_prompt",
            f"is for model.{role}.pooling=mean; leave it out",
        )
        for index, head in enumerate(tower.heads):
            OptionChecks(head, f"model.{role}.heads[{index}].").at_least(1, "out")


def tower_options(model: DualEncoderOptions, role: str) -> DenseOptions:
    """The options of a tower as those of a model of its own."""
    tower: TowerOptions = getattr(model, role)
    options = {field.name: getattr(tower, field.name) for field in fields(tower)}
    inherited = {name: getattr(model, name) for name in ("max_length", "normalize") if options[name] is None}
    return DenseOptions(**options | inherited)


def check_export_options(export: ExportConfig, prefix: str = "") -> None:
    """Raise a ConfigError for options of an export that need a model with one tower; `prefix` precedes their names."""
    for name in export.formats:
        if name == ADAPTER or name.startswith("onnx"):
            raise ConfigError(
                f"{prefix}formats={written(export.formats)}: {name} has one tower, and model.kind=dual_encoder has "
                "two; leave it out"
            )
    if export.max_file_size != ExportConfig.max_file_size:
        raise ConfigError(
            f"{prefix}max_file_size={export.max_file_size}: the weights of each of the two towers are one file; leave "
            "it out"
        )
    if export.rope_theta is not None:
        raise ConfigError(f"{prefix}rope_theta={export.rope_theta:g}: is not supported with two towers; leave it out")
