"""Options of model.kind=image_text."""

from dataclasses import dataclass, field

from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.options import option
from embedtrain.config.recipe import ADAPTER, OPENVINO, ExportConfig, ModelConfig
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

TOWERS = ("text", "image")
# Options that no class of such a model has.
_UNSUPPORTED = ("bidirectional", "rope_theta", "rope_scaling", "trust_remote_code")


@dataclass(kw_only=True)
class ImageTextTower:
    """A tower: the encoder of texts, or that of pictures."""

    # Hub id or directory of a model of texts, or of pictures, of which a new pair is made; default: that of model.path
    path: str | None = option(None, is_input=True)
    revision: str | None = None  # a commit, tag or branch of its Hub repository
    frozen: bool = False  # train nothing of what its files have; a new projection is trained


@dataclass(kw_only=True)
class ImageTextOptions(ModelConfig):
    """A vector per text and per picture, by a tower each (CLIP, SigLIP)."""

    kind: str = "image_text"
    text: ImageTextTower = field(default_factory=ImageTextTower)  # the tower of texts
    image: ImageTextTower = field(default_factory=ImageTextTower)  # the tower of pictures
    # dimensions of the vectors of a pair that is made of text.path and image.path, by new projections
    projection_dim: int = option(512, at_least=1)
    normalize: bool | None = None  # L2-normalize vectors; default: that of a sentence-transformers directory, else true
    # How vectors are compared in evaluation, mining and search, and in the exported model: cosine, dot, euclidean or
    # manhattan. Default: as the loss compares them unless they are normalised, else that of the directory, else cosine.
    similarity: VectorSimilarity | None = None


def check_image_text(model: ImageTextOptions) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    check, defaults = OptionChecks(model, "model."), ImageTextOptions()
    for name in _UNSUPPORTED:
        check.require(
            getattr(model, name) == getattr(defaults, name),
            name,
            "is not supported with a tower for texts and one for pictures (model.kind=image_text); leave it out",
        )
    if model.lora.path is not None:
        raise ConfigError(
            f"model.lora.path={model.lora.path}: is the adapter of one model, and model.kind=image_text has two "
            "towers; write model.lora.rank for new adapters"
        )
    paths = {name: getattr(model, name).path for name in TOWERS}
    if len(missing := [name for name, path in paths.items() if path is None]) == 1:
        (other,) = set(TOWERS) - set(missing)
        raise ConfigError(
            f"model.{other}.path={paths[other]}: a pair needs both towers; write model.{missing[0]}.path as well, or "
            "model.path for a model that has both"
        )
    for name, path in paths.items():
        for whole in ("path", "config"):
            if path is not None and getattr(model, whole) is not None:
                raise ConfigError(
                    f"model.{whole} and model.{name}.path={path} are both set: the first has both towers; keep one"
                )
        OptionChecks(getattr(model, name), f"model.{name}.").require(
            path is not None or getattr(model, name).revision is None,
            "revision",
            f"chooses a version of a Hub repository; set model.{name}.path to its id, or write model.revision",
        )
    check.require(
        paths["text"] is not None or model.projection_dim == defaults.projection_dim,
        "projection_dim",
        "is for a pair that is made of model.text.path and model.image.path; leave it out",
    )
    if model.text.frozen and model.image.frozen and paths["text"] is None:
        raise ConfigError("model.text.frozen=true, model.image.frozen=true: nothing is left to train; leave one out")


def check_export_options(export: ExportConfig, prefix: str = "") -> None:
    """Raise a ConfigError for formats of an export that have one tower; `prefix` precedes their names."""
    if OPENVINO in export.formats:
        raise ConfigError(
            f"{prefix}formats={written(export.formats)}: {OPENVINO} has one tower, and model.kind=image_text has two; "
            "leave it out"
        )


def check_adapter_alone(model: ImageTextOptions, export: ExportConfig) -> None:
    """Raise a ConfigError for adapters that are not all that is trained, in a file of their own."""
    if ADAPTER not in export.formats:
        return
    adapters = model.adapters
    trained = (f"{adapters.section}.modules_to_save", adapters.modules_to_save or None)
    for name, value in (("model.text.path", model.text.path), trained):
        if value is not None:
            raise ConfigError(
                f"{name}={written(value)}: PEFT's adapter format cannot hold what is trained beside "
                f"adapters; leave {ADAPTER} out of export.formats (the merged model has it)"
            )
