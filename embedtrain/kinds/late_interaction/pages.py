"""Late interaction over pages: queries are texts, documents are pictures of pages (Faysse et al., 2024, "ColPali").

The backbone is a vision-language model, and every token has a vector: those of the picture, and those that stand around
it. See `formats/page_models.py` for what the classes of two libraries write around texts and pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.config.kind_settings import PageLibrary, TokenSimilarity, TokenVectors
from embedtrain.config.kinds import Kind
from embedtrain.config.validation import written
from embedtrain.data.images.files import PICTURES
from embedtrain.data.images.item import Picture
from embedtrain.data.images.settings import PROCESSOR_FILE
from embedtrain.data.types import NO_VECTOR, PICTURE, TextRole, Tokens
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.formats.chat_template import Piece
from embedtrain.formats.page_models import (
    TEXT_KEYS,
    PageTexts,
    PageWriter,
    backbone_config,
    backbone_keys,
    describe,
    projection_key,
    writer_for,
    writer_of,
)
from embedtrain.formats.peft import open_adapter
from embedtrain.formats.pylate import token_similarity
from embedtrain.formats.sentence_transformers import (
    IDENTITY,
    SETTINGS,
    prompts_of,
    read_modules,
    read_transformer_settings,
)
from embedtrain.formats.source import StoredModel, adapted_config, require_own_transformer
from embedtrain.formats.transformers import check_config, read_tokenizer
from embedtrain.kinds.dense.model import VisionLayout
from embedtrain.kinds.dense.vision import VisionSettings, layout_parts, picture_ids, picture_token, read_processing
from embedtrain.kinds.late_interaction.options import LateInteractionOptions, check_pages
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import hidden_size
from embedtrain.models.file_references import read_json
from embedtrain.models.rope import num_positions
from embedtrain.models.stored_weights import TensorLocation, read_tensor, stored_shape, stored_tensors
from embedtrain.models.types import DenseSource, ModelSource, Tokenization, VectorSettings

_LARGE = 8192  # pixels of a side, or tokens


@dataclass(frozen=True, kw_only=True)
class PageVectors(TokenVectors):
    """The settings of a model over pages.

    Attributes:
        vision: how pictures are read.
        writer: the class that computes the same.
        texts: what stands around queries, texts and pages.
        only_pictures: whether pages have vectors of the tokens of pictures alone, without those around them.
    """

    vision: VisionSettings
    writer: PageWriter
    texts: PageTexts
    only_pictures: bool = False


def of_pages(source: ModelSource) -> bool:
    """Whether a late-interaction model reads pages."""
    return isinstance(source.settings, PageVectors)


def read_pages(kind: Kind, directory: Path, model: LateInteractionOptions) -> ModelSource | None:
    """The model of a directory that a class of `WRITERS` opens; None of other directories. Raises ModelError."""
    modules = _read_modules(directory)
    transformer = directory if modules is None else modules.transformer
    writer = writer_of(transformer)
    if writer is None:
        return None
    if transformer != directory:
        require_own_transformer(transformer, directory, model)
    if model.page_library not in (None, writer.library):
        raise ConfigError(
            f"model.page_library={written(model.page_library)}: {directory} is {describe(writer)}, whose vectors are "
            "others; leave it out"
        )
    outer = adapted_config(transformer, model)
    config = check_config(backbone_config(outer, writer, transformer), str(transformer))
    dense = _projection(transformer, writer, hidden_size(config), getattr(outer, "embedding_dim", writer.dimension))
    if (adapter := open_adapter(model.lora)) is not None:
        dense = replace(dense, adapter=adapter.of_head(writer.projection))
    if model.dimension not in (None, dense.num_out):
        raise ConfigError(
            f"model.dimension={model.dimension}: the projection in {transformer} has {dense.num_out} dimensions; "
            "leave it out"
        )
    settings, max_length = _settings(transformer, config, writer, model), None
    if modules is not None:
        kept, max_length = modules.kept_tokens, modules.max_length
        if kept and list(kept) != [config.image_token_id]:
            raise ModelError(
                f"{directory}: keep_only_token_ids={list(kept)!r:.100} is not the token of pictures alone, "
                f"{config.image_token_id}"
            )
        only = bool(kept) if model.only_picture_vectors is None else model.only_picture_vectors
        settings = replace(settings, only_pictures=only, similarity=model.similarity or modules.similarity)
    return ModelSource(
        kind=kind,
        settings=settings,
        directory=transformer,
        config=config,
        vectors=VectorSettings(dense=(dense,)),
        tokenization=_tokenization(settings, config, transformer, model, max_length),
        prompts={"query": "", "document": ""} if modules is None else modules.prompts,
        trust_remote_code=model.trust_remote_code,
    )


@dataclass(frozen=True)
class _Modules:
    """What sentence-transformers says of a directory."""

    transformer: Path
    max_length: int | None
    kept_tokens: list[Any]
    prompts: dict[str, str]
    similarity: TokenSimilarity


def _read_modules(directory: Path) -> _Modules | None:
    """The modules of a MultiVectorEncoder whose first one has the projection; None of other directories."""
    if not (directory / "modules.json").is_file():
        return None
    modules = read_modules(directory)
    transformer = modules[0].path if modules else directory
    stored = read_transformer_settings(transformer)
    if stored.get("transformer_task") != "retrieval":
        return None
    kinds = [module.kind for module in modules]
    if kinds not in (["Transformer"], ["Transformer", "MultiVectorMask"]):
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; supported in a model of pages are "
            "Transformer and MultiVectorMask"
        )
    mask = read_json(path) if len(modules) > 1 and (path := modules[1].path / "config.json").is_file() else {}
    if mask.get("skiplist_words"):
        raise ModelError(f"{path}: skiplist_words is not supported in a model of pages, whose documents are pictures")
    settings = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    return _Modules(
        transformer=transformer,
        max_length=stored.get("max_seq_length"),
        kept_tokens=list(mask.get("keep_only_token_ids") or ()),
        prompts=prompts_of(settings, directory / SETTINGS),
        similarity=token_similarity(directory / SETTINGS, settings),
    )


def new_pages(source: ModelSource, files: StoredModel, model: LateInteractionOptions) -> ModelSource:
    """A vision-language model with a new projection, whose weights start from the seed."""
    model_type = source.config.model_type
    writer = writer_for(model_type, model.page_library)
    if writer is None:
        library = model.page_library
        has = "neither library has" if library is None else f"model.page_library={library.value}: it has"
        raise ConfigError(f"{has} a class of late interaction over pages for {model_type}; leave it out")
    dimension = model.dimension or writer.dimension
    if writer.wrapper is None and dimension != writer.dimension:
        raise ConfigError(
            f"model.dimension={dimension}: {describe(writer)} has vectors of {writer.dimension} dimensions; leave it "
            "out"
        )
    new = DenseSource(
        directory=None, num_in=hidden_size(source.config), num_out=dimension, bias=True, activation=IDENTITY
    )
    settings = replace(_settings(files.directory, source.config, writer, model), is_new=True)
    return replace(
        source,
        settings=settings,
        vectors=VectorSettings(dense=(new,)),
        tokenization=_tokenization(settings, source.config, files.directory, model, None),
        prompts={"query": "", "document": ""},  # of a model of one vector, with a chat template
    )


def convert_pages(source: ModelSource, library: PageLibrary) -> ModelSource:
    """A model over pages as the class of another library computes it; a ConfigError if that has none for it."""
    settings: PageVectors = source.settings
    option = f"page_library={library.value}"
    if settings.writer.library is library:
        raise ConfigError(f"{option}: {source.directory} is {describe(settings.writer)} already; copy it instead")
    writer = writer_for(source.config.model_type, library)
    if writer is None:
        raise ConfigError(f"{option}: it has no class over pages for {source.config.model_type}; keep the directory")
    if writer.wrapper is None and source.dimension != writer.dimension:
        raise ConfigError(
            f"{option}: {describe(writer)} has vectors of {writer.dimension} dimensions, and those of "
            f"{source.directory} have {source.dimension}; keep the directory"
        )
    lost = [name for name, text in source.prompts.items() if text] + ["only_picture_vectors"] * settings.only_pictures
    if library is PageLibrary.colpali_engine and lost:
        raise ConfigError(f"{option}: its directories have no place for {' and '.join(lost)}; keep the directory")
    assert source.directory is not None
    directory, options = source.directory, LateInteractionOptions(trust_remote_code=source.trust_remote_code)
    made = _settings(directory, source.config, writer, options, is_own=False)
    vision = replace(made.vision, frozen=settings.vision.frozen)
    return replace(
        source,
        settings=replace(settings, vision=vision, writer=writer, texts=made.texts),
        tokenization=_tokenization(made, source.config, directory, options, None),
    )


def _settings(
    directory: Path, config: PretrainedConfig, writer: PageWriter, model: LateInteractionOptions, *, is_own: bool = True
) -> PageVectors:
    """How the files, and the class, read texts and pages; `is_own`: of the class that has written the files."""
    check_pages(model)
    if writer.library is PageLibrary.colpali_engine and model.only_picture_vectors:
        raise ConfigError(
            "model.only_picture_vectors=true: colpali-engine has an argument for it (mask_non_image_embeddings), and "
            "no place in a directory; leave it out, or write the model for transformers"
        )
    processing, processor = read_processing(directory, config, model.image)
    path = directory / PROCESSOR_FILE
    stored = read_json(path) if path.is_file() and is_own else {}
    tokenizer = read_tokenizer(directory, trust_remote_code=model.trust_remote_code)
    texts = writer.texts(stored, tokenizer, picture_token(tokenizer, config), directory)
    processor |= {"processor_class": writer.processor_class}
    if writer.library is PageLibrary.transformers:
        processor.pop("video_processor", None)
        processor |= writer.stored_texts(texts, tokenizer)
    else:
        processor = {name: value for name, value in processor.items() if name not in TEXT_KEYS}
    vision = VisionSettings(
        processing=processing,
        processor=processor,
        template=texts.page,
        chat_template="",
        chat_options={},
        frozen=model.image.frozen,
        has_axes=writer.has_axes,
    )
    return PageVectors(
        vision=vision,
        writer=writer,
        texts=texts,
        query_length=model.query_length,
        document_length=model.document_length,
        similarity=model.similarity or TokenSimilarity.maxsim,
        only_pictures=bool(model.only_picture_vectors),
    )


def _tokenization(
    settings: PageVectors,
    config: PretrainedConfig,
    directory: Path,
    model: LateInteractionOptions,
    max_length: int | None,
) -> Tokenization:
    """Items have at most the tokens of the largest page, unless the files say otherwise."""
    if max_length is None:
        tokenizer = read_tokenizer(directory, trust_remote_code=model.trust_remote_code)
        processing, template = settings.vision.processing, settings.texts.page
        # The grid of a large square has the most markup.
        grid = processing.grid(_LARGE, _LARGE)
        markup = len(picture_ids(tokenizer, config, processing, template, *grid)) - processing.num_tokens(
            _LARGE, _LARGE
        )
        around = len(tokenizer(f"{template.starts[0]}{template.end}")["input_ids"])
        positions = num_positions(config.get_text_config())
        max_length = min(processing.most_tokens + markup + around, positions or _LARGE)
    return Tokenization(max_length=max_length, is_sentence_transformers=True)


def _projection(directory: Path, writer: PageWriter, size: int, dimension: int) -> DenseSource:
    """The projection among the weights of a directory; a ModelError if there is none that fits.

    A directory of an architecture has no weights yet.
    """
    stored = stored_tensors(directory)
    inline = DenseSource(
        directory=directory,
        num_in=size,
        num_out=dimension,
        bias=True,
        activation=IDENTITY,
        inline=writer.projection,
    )
    if not stored:
        return inline
    key = projection_key(stored, writer)
    if key is None or f"{key}.bias" not in stored:
        raise ModelError(
            f"{directory} has no safetensors with {writer.projection}, the projection of {writer.model_class}"
        )
    num_out, *others = stored_shape(stored[f"{key}.weight"])
    if others != [size]:
        raise ModelError(f"{directory}: {key}.weight has the shape {[num_out, *others]}, not [dimensions, {size}]")
    return replace(inline, num_out=num_out, inline=key)


def locate_pages(source: ModelSource, names: Sequence[str]) -> dict[str, TensorLocation]:
    """Where the weights of a backbone, which have these names in the encoder, are in its files."""
    assert source.directory is not None
    stored = stored_tensors(source.directory)
    keys = backbone_keys(stored, [name.removeprefix("backbone.") for name in names if name.startswith("backbone.")])
    return {f"backbone.{name}": stored[key] for name, key in keys.items()}


def read_page_weights(source: ModelSource) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of a backbone in a directory of pages, by the encoder's names, and the names that it lacks."""
    names = [name for name in build_encoder(source).state_dict() if name.startswith("backbone.")]
    weights = {name: read_tensor(location) for name, location in locate_pages(source, names).items()}
    return weights, set(names) - set(weights)


class PageLayout(VisionLayout):
    """Queries, which are texts, and documents, which are texts or one page each; all tokens have vectors.

    Args:
        settings: of the model.
    """

    roles_differ: ClassVar[bool] = True
    has_token_rows: ClassVar[bool] = True
    joins_pictures: ClassVar[bool] = False

    def __init__(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, *layout_parts(source, tokenizer))
        self.settings: PageVectors = source.settings
        if source.prompts.get("document"):
            raise ConfigError(
                f"model.document_prompt={source.prompts['document']!r:.60}: what stands before a page is that of "
                f"{self.settings.writer.processor_class}; leave it out"
            )

    def limit(self, role: TextRole, max_length: int) -> int:
        """The maximal number of tokens, with those that stand around an item."""
        settings = self.settings
        own = settings.query_length if role is TextRole.query else settings.document_length
        return max_length if own is None else min(own, max_length)

    def around(self, prompt: str, parts: Sequence[str | Picture], role: TextRole) -> list[Piece | Picture]:
        """A text as a query or document, or a page; a DataError for other items."""
        texts = self.settings.texts
        if not any(isinstance(part, Picture) for part in parts):
            return (texts.query if role is TextRole.query else texts.document).around(prompt, parts)
        if len(parts) > 1 or prompt:
            has = "a prompt" if prompt else "texts" if any(isinstance(part, str) for part in parts) else "others"
            first = next(part for part in parts if isinstance(part, Picture))
            raise DataError(
                f"{PICTURES.place(first)}: stands beside {has} in one item, and {self.settings.writer.model_class} "
                "reads a text or one page"
            )
        return texts.page.around("", parts)

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """With `only_pictures`, what stands around a page is flagged NO_VECTOR."""
        if not self.settings.only_pictures or not (tokens.flags & PICTURE).any():
            return tokens
        of_pages = np.repeat(tokens.count(PICTURE) > 0, tokens.lengths)
        around = of_pages & (tokens.flags & PICTURE == 0)
        return Tokens(tokens.ids, tokens.flags | np.where(around, NO_VECTOR, np.uint8(0)), tokens.lengths)

    def picture_flags(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """With `only_pictures`, markup among the rows of a picture has no vector."""
        if not self.settings.only_pictures:
            return super().picture_flags(ids)
        return np.where(ids == self.markup.image, np.uint8(0), NO_VECTOR)

    def num_vectors(self, tokens: Tokens) -> NDArray[np.int64]:
        """All tokens, or those without NO_VECTOR: int64 [N]."""
        counts = self.num_tokens(tokens) - tokens.count(NO_VECTOR)
        if self.settings.only_pictures:
            slots = tokens.slots()
            without = [np.count_nonzero(self.picture_flags(self._ids(*size)[0])) for size in slots.sizes.tolist()]
            np.subtract.at(counts, slots.owners, np.array(without, dtype=np.int64))
        return counts

    def sizes(self, lengths: Any, are_queries: Any, tokens: Any) -> tuple[NDArray[np.int64] | None, ...]:
        """Vectors of each text. Ranks exchange rows without asking each other how many these are."""
        return (self.num_vectors(tokens(np.arange(len(lengths)))),)

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """The most vectors of a query, and of a document: of a page the largest that the processor makes."""
        return self.limit(TextRole.query, max_length), self.limit(TextRole.document, max_length)

    @property
    def identity(self) -> tuple[Any, ...]:
        """With what stands around texts."""
        texts = self.settings.texts
        return (*super().identity, str(texts.query), str(texts.document), self.settings.only_pictures)


def page_identity(settings: PageVectors) -> dict[str, Any]:
    """What decides the vectors of the same files."""
    return {
        "processing": settings.vision.processing.digest,
        "texts": str(settings.texts),
        "has_axes": settings.vision.has_axes,
        "only_pictures": settings.only_pictures,
        "lengths": [settings.query_length, settings.document_length],
    }
