"""model.kind=image_text: a vector per text and per picture, by a tower each (CLIP, SigLIP, SigLIP 2, other pairs)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedtrain.config.kinds import Kind
from embedtrain.config.validation import model_option, tower_options_named
from embedtrain.kinds.image_text.options import (
    TOWERS,
    ImageTextOptions,
    check_adapter_alone,
    check_export_options,
    check_image_text,
)
from embedtrain.models.file_references import read_json

if TYPE_CHECKING:
    from torch import Size, Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from embedtrain.config.recipe import ModelConfig, Recipe
    from embedtrain.data.tokens import Layout
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.losses.types import Loss
    from embedtrain.models.encoder import Encoder
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource


class ImageText(Kind):
    """A vector per text and per picture, by a tower each."""

    name = "image_text"
    summary = "a vector per text and per picture"
    aliases: ClassVar[tuple[str, ...]] = ("clip", "siglip", "siglip2", "imagetext", "visiontextdualencoder")
    has_one_vector = True
    measures_classes = True
    options: ClassVar[type[Any]] = ImageTextOptions
    new_part = "projections"
    command_options: ClassVar[tuple[str, ...]] = ("normalize", "similarity")
    has_one_model = False
    has_one_tower = False
    temperature = None  # that of the model's files
    temperature_bounds = (0.001, 1.0)

    def dimension(self, source: "ModelSource") -> int:
        """That of the projections, or of a tower without one."""
        config = source.config
        size = getattr(config, "projection_dim", None)
        return int(config.vision_config.hidden_size if size is None or not _has_projections(config) else size)

    def outputs(self, source: "ModelSource") -> str:
        """Both towers, and normalisation."""
        vision = source.config.vision_config
        frozen = "".join(f", {name} tower frozen" for name in source.settings.frozen)
        new = f", new projections to {source.dimension} dimensions" * source.settings.is_new
        return (
            f"texts by {source.config.get_text_config().model_type}, pictures by {vision.model_type}"
            f"{new}{', normalised' * source.vectors.normalize}{frozen}"
        )

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """How pictures are read."""
        return {"image processing": source.settings.processing.digest}

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Items of one text or one picture."""
        from embedtrain.kinds.image_text.model import ImageTextLayout

        return ImageTextLayout(tokenizer, source.settings.processing, source.config.get_text_config())

    def check_options(self, model: ImageTextOptions) -> None:
        """Values and combinations."""
        check_image_text(model)

    def check_other_options(self, recipe: "Recipe") -> None:
        """Formats of exports."""
        check_export_options(recipe.export, "export.")
        if isinstance(recipe.model, ImageTextOptions):
            check_adapter_alone(recipe.model, recipe.export)

    def recognise(self, directory: Path) -> str | None:
        """By the type of model in config.json, which may be in the folder of an old module."""
        path = _folder(directory) / "config.json"
        kind = read_json(path).get("model_type") if path.is_file() else None
        is_known = kind in ("clip", "siglip", "siglip2", "vision-text-dual-encoder")
        return f"a model of texts and pictures ({kind})" if is_known else None

    def require_other(self, directory: Path, what: str, model: "ModelConfig") -> None:
        """Neither tower is the model."""
        from embedtrain.errors import ConfigError

        raise ConfigError(
            f"{model_option('kind')}={model.kind}: {directory} is {what}; write {model_option('kind')}=image_text"
        )

    def read(self, directory: Path, model: ImageTextOptions) -> "ModelSource":
        """A directory with both towers."""
        from embedtrain.kinds.image_text.source import read

        return read(self, directory, model)

    def with_models(self, model: Any, change: Callable[[Any], Any]) -> Any:
        """Those of the towers of a new pair, or the whole."""
        if model.text.path is None or model.image.path is None:
            return change(model)
        towers = {}
        for name in TOWERS:
            with tower_options_named(name):
                towers[name] = change(getattr(model, name))
        return replace(model, **towers)

    def assembled(self, model: ImageTextOptions) -> "ModelSource | None":
        """A pair of two models."""
        from embedtrain.kinds.image_text.source import assembled

        return assembled(self, model)

    def new(self, source: "ModelSource", model: ImageTextOptions) -> "ModelSource":
        """A model of random weights."""
        from embedtrain.kinds.image_text.source import new

        return new(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """The similarity of two vectors."""
        from embedtrain.inference.vectors import vector_score

        return vector_score(source.vectors.similarity)

    def model_class(self, config: "PretrainedConfig") -> Any:
        """The class with both towers."""
        from transformers import AutoModel

        return AutoModel

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The towers of the class side by side."""
        from embedtrain.kinds.image_text.model import image_text_encoder

        settings = source.settings
        return image_text_encoder(
            model,
            settings.processing,
            normalize=source.vectors.normalize,
            frozen=settings.frozen,
            is_new=settings.is_new,
        )

    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """Those of the class, or of the two classes of a new pair."""
        from embedtrain.kinds.image_text.source import read_weights

        return read_weights(source)

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """All weights of the class; those of a new pair are not in one directory."""
        from embedtrain.kinds.image_text.source import located

        return ({} if source.settings.folders else located(shapes, stored)), set()

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """How pictures are read, and by which library, and whether vectors are normalised."""
        from embedtrain.data.images.files import image_identity

        return {"image_text": [source.settings.processing.digest, image_identity(), source.vectors.normalize]}

    def longest_item(self, source: "ModelSource", max_length: int) -> int:
        """The longer of a text and of a picture."""
        return max(max_length, int(source.settings.processing.most_patches))

    def share_weights(self, loss: "Loss", encoder: "Encoder") -> None:
        """The temperature, and the bias of SigLIP's loss."""
        from embedtrain.kinds.image_text.model import ImageTextEncoder

        assert isinstance(encoder, ImageTextEncoder)
        encoder.share(loss, self.temperature_bounds)

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/image_text/files.py`."""
        from embedtrain.kinds.image_text.files import ImageTextFiles

        return ImageTextFiles()


def _folder(directory: Path) -> Path:
    from embedtrain.formats.sentence_transformers import OLD_CLIP, read_modules

    modules = read_modules(directory) if (directory / "modules.json").is_file() else []
    return modules[0].path if modules and modules[0].kind == OLD_CLIP else directory


def _has_projections(config: "PretrainedConfig") -> bool:
    return config.model_type in ("clip", "vision-text-dual-encoder")
