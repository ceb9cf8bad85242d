"""Options of model.kind=dense."""

from dataclasses import dataclass, field

from embedtrain.config.code import code_option, is_code_path
from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.loss_checks import guide_paths
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.names import explain_no_name
from embedtrain.config.options import option
from embedtrain.config.recipe import POOLINGS, ModelConfig, Pooling, Recipe
from embedtrain.config.row_requirements import ScoreRequirement
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

# Options that vision-language models do not have.
_UNSUPPORTED = ("bidirectional", "rope_theta", "rope_scaling", "include_prompt")
# In a model directory whose documents are encoded in chunks: {"late": true}.
CHUNKING_FILE = "chunking.json"


@dataclass(kw_only=True)
class ImageOptions:
    """How a vision-language model reads pictures."""

    frozen: bool = False  # train nothing of the vision tower and of what projects its rows
    # pixels of a picture, which the image processor of Qwen-VL makes larger or smaller; default: those of the directory
    min_pixels: int | None = option(None, at_least=1)
    max_pixels: int | None = option(None, at_least=1)


@dataclass(kw_only=True)
class ChunkingOptions:
    """Documents in chunks."""

    # Late chunking: encode a document in one forward pass, and pool each of its chunks to a vector of its own, which
    # knows the rest of the document. Default: that of the directory, else false.
    late: bool | None = None
    # The other chunks of a document are negatives, of its own query and of the others; false: they are context alone.
    negatives: bool = True


@dataclass(kw_only=True)
class DenseOptions(ModelConfig):
    """A vector per text."""

    kind: str = "dense"
    # `cls`, `mean`, `last`, `max` or `weighted_mean` (weights 1, 2, 3, ... in the order of the tokens), or module:Class
    # for your own; default: that of a sentence-transformers directory.
    pooling: str | None = code_option(None, names=POOLINGS)
    normalize: bool | None = None  # L2-normalize embeddings; default: that of the directory, else true
    # How vectors are compared in evaluation, mining and search, and in the exported model: cosine, dot, euclidean or
    # manhattan. Default: as the loss compares them unless they are normalised, else that of the directory, else cosine.
    similarity: VectorSimilarity | None = None
    # New dense heads between pooling and normalisation, for a model whose directory has none.
    heads: list[HeadConfig] = field(default_factory=list)
    append_eos: bool | None = None  # end every text with the end-of-text token; default: true with pooling `last`
    include_prompt: bool | None = None  # include the prompt in mean pooling; default: that of the directory, else true
    image: ImageOptions = field(default_factory=ImageOptions)  # of a vision-language model
    chunking: ChunkingOptions = field(default_factory=ChunkingOptions)
    # What a vision-language model reads around an item, with {item} once, and {prompt} before it. Default: what the
    # chat template of the directory writes, with the prompt as a system message; without a template {prompt}{item}.
    item_template: str | None = None


def check_dense(model: DenseOptions) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    if model.config is not None and model.pooling is None:
        raise ConfigError("model.config does not define pooling: set model.pooling to cls, mean or last")
    if model.include_prompt is False and model.pooling not in (None, Pooling.mean):
        raise ConfigError(include_prompt_error(model.pooling))
    if model.pooling is not None and model.pooling not in POOLINGS:
        if not is_code_path(model.pooling):
            raise ConfigError(explain_no_name("model.pooling", model.pooling, POOLINGS))
        if model.adapters.on:
            raise ConfigError(
                f"model.pooling={model.pooling}: adapters are stored without its weights; leave model.lora out"
            )
    for index, head in enumerate(model.heads):
        OptionChecks(head, f"model.heads[{index}].").at_least(1, "out")


def check_chunked_losses(recipe: Recipe) -> None:
    """Raise a ConfigError for a loss of whole documents, where those of the rows are compared chunk by chunk."""
    for loss in (recipe.loss, *(source.loss for source in recipe.data.train if source.loss is not None)):
        needs = loss.row_requirements
        is_of_documents = needs.scores is not ScoreRequirement.none or needs.vectors or needs.same_num_documents
        if is_of_documents or guide_paths(loss):
            raise ConfigError(
                f"loss={loss.name}: compares whole documents by scores, vectors or a guide, or the same number of each "
                "row, and with model.chunking.late=true each chunk of a document is one; write loss=infonce without "
                "guide"
            )


def check_vision(model: DenseOptions, *, is_vision: bool) -> None:
    """Raise a ConfigError for options that fit only a vision-language model, or only another one."""
    check, defaults = OptionChecks(model, "model."), DenseOptions()
    for name in _UNSUPPORTED if is_vision else ("item_template",):
        check.require(
            getattr(model, name) == getattr(defaults, name),
            name,
            "is not for a vision-language model; leave it out"
            if is_vision
            else "is for a vision-language model, and this one reads texts alone; leave it out",
        )
    if not is_vision:
        require_no_image_options(model.image)
    template = model.item_template
    if template is not None:
        before, _, after = template.partition("{item}")
        check.require(
            template.count("{item}") == 1 and before.count("{prompt}") <= 1 and "{prompt}" not in after,
            "item_template",
            "must have {item} once, and {prompt} before it once or not at all",
        )


def require_no_image_options(image: ImageOptions) -> None:
    """Raise a ConfigError for an option of pictures, of a model that reads texts alone."""
    for name, value in vars(ImageOptions()).items():
        OptionChecks(image, "model.image.").require(
            getattr(image, name) == value,
            name,
            "is for a vision-language model, and this one reads texts alone; leave it out",
        )


def include_prompt_error(pooling: str) -> str:
    """The message for `model.include_prompt=false` with a pooling other than mean."""
    return (
        f"model.include_prompt=false is for model.pooling=mean: with {written(pooling)} the embedding is that of one "
        "token; leave include_prompt out"
    )
