"""Options of model.kind=late_interaction."""

from dataclasses import dataclass, field

from embedtrain.config.kind_settings import PageLibrary, QueryExpansion, TokenSimilarity
from embedtrain.config.options import LENGTH, option
from embedtrain.config.recipe import ModelConfig
from embedtrain.config.validation import OptionChecks
from embedtrain.kinds.dense.options import ImageOptions, require_no_image_options


@dataclass(kw_only=True)
class LateInteractionOptions(ModelConfig):
    """A vector per token of a text, and their comparison (ColBERT)."""

    kind: str = "late_interaction"
    # dimensions of a token's vector; default: that of the directory, else 128
    dimension: int | None = option(None, at_least=1)
    # tokens of a query; default: that of the directory, else model.max_length
    query_length: int | None = option(None, **LENGTH)
    # tokens of a document; default: that of the directory, else model.max_length
    document_length: int | None = option(None, **LENGTH)
    query_expansion: QueryExpansion | None = None  # default: that of the directory, else none
    # tokens of an expanded query; default: that of the directory, else 32
    expansion_length: int | None = option(None, **LENGTH)
    # The token that queries are expanded with; default: that of the directory, else the mask token, or the end-of-text
    # token of a tokenizer without one.
    expansion_token: str | None = None
    attend_to_expansion_tokens: bool | None = None  # default: that of the directory, else false
    # Words of documents whose vectors are left out, each one token, such as punctuation; default: that of the
    # directory, else none.
    skiplist_words: list[str] | None = None
    similarity: TokenSimilarity | None = None  # default: that of the directory, else maxsim
    image: ImageOptions = field(default_factory=ImageOptions)  # of a model over pages
    # The library whose class a new model over pages is for; default: transformers if it has one for the backbone, else
    # colpali_engine. A directory of such a model is written as it was read.
    page_library: PageLibrary | None = None
    # Of a model over pages: pages have vectors of the tokens of pictures alone, without those of what stands around
    # them; default: that of the directory, else false.
    only_picture_vectors: bool | None = None


# Options that a model over pages does not have: its processor decides, or transformers' class.
_NOT_OF_PAGES = (
    "query_expansion", "expansion_length", "expansion_token", "attend_to_expansion_tokens", "skiplist_words",
    "bidirectional", "rope_theta", "rope_scaling",
)  # fmt: skip


def check_pages(options: LateInteractionOptions) -> None:
    """Raise a ConfigError for options that do not fit a model over pages."""
    check, defaults = OptionChecks(options, "model."), LateInteractionOptions()
    for name in _NOT_OF_PAGES:
        check.require(
            getattr(options, name) == getattr(defaults, name),
            name,
            "is not for a model over pages, whose processor writes what stands around texts; leave it out",
        )


def check_no_pages(options: LateInteractionOptions) -> None:
    """Raise a ConfigError for options that fit only a model over pages."""
    defaults = LateInteractionOptions()
    for name in ("page_library", "only_picture_vectors"):
        OptionChecks(options, "model.").require(
            getattr(options, name) == getattr(defaults, name),
            name,
            "is for a model over pages, and this one reads texts alone; leave it out",
        )
    require_no_image_options(options.image)


def check_late_interaction(options: LateInteractionOptions) -> None:
    """Raise a ConfigError for options without an effect, and for lengths that do not fit each other."""
    check = OptionChecks(options, "model.")
    not_expanded = options.query_expansion is QueryExpansion.none or (
        options.query_expansion is None and options.path is None
    )
    for name in ("expansion_length", "expansion_token", "attend_to_expansion_tokens"):
        check.require(
            getattr(options, name) is None or not not_expanded,
            name,
            "has no effect without expansion; set model.query_expansion to min or fixed",
        )
    if options.query_length is not None and options.expansion_length is not None:
        check.require(
            options.query_length >= options.expansion_length,
            "query_length",
            f"is below expansion_length={options.expansion_length}, the tokens of an expanded query; lower that as "
            "well, or leave query_length out",
        )
