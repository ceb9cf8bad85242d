"""Directories of late interaction over pages, the pictures of documents: ColPali, ColQwen, ColSmol, ColModernVBERT.

Two libraries write them: transformers (`*ForRetrieval`, which sentence-transformers opens), and colpali-engine. With
equal weights they compute other vectors, because what stands around texts and pages, and the positions of a page's
tokens, are theirs. So which of them wrote a directory is a part of the model: it is trained as that library computes
it, and written as it was read.

The facts are those of transformers 5.23 and colpali-engine 0.3.18.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.config.kind_settings import PageLibrary
from embedtrain.errors import ModelError
from embedtrain.formats.chat_template import ItemTemplate
from embedtrain.models.file_references import read_json
from embedtrain.utils.files import write_json

_QWEN_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
_MODERNVBERT_PAGE = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_IDEFICS_PAGE = "<|im_start|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
TEXT_KEYS = ("query_prefix", "visual_prompt_prefix")  # of processor_config.json
_NUM_AUGMENTATION = 10  # tokens behind a query, whose vectors are compared as well
_ENDS_UTTERANCE, _ENDS_TEXT = "<end_of_utterance>", "<|endoftext|>"
# What wraps the names of weights, or of parts of the backbone in older versions of transformers.
_WRAPPERS = ("base_model.model.", "vlm.", "model.")
_OLD_NAMES = (
    ("language_model.model.", "language_model."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("layers.", "language_model.layers."),
    ("embed_tokens.", "language_model.embed_tokens."),
    ("norm.", "language_model.norm."),
)


@dataclass(frozen=True, kw_only=True)
class PageTexts:
    """What stands around a query, around a document that is a text, and around a page."""

    query: ItemTemplate
    document: ItemTemplate
    page: ItemTemplate


@dataclass(frozen=True, kw_only=True)
class _Around:
    """What a processor writes.

    Attributes:
        page: around a page, with the token of pictures once.
        query: before a query, and behind its further tokens.
        augmentation: the token of these; None: the padding token.
        special_tokens: whether the tokenizer adds its own.
    """

    page: str
    query: tuple[str, str] = ("", "")
    augmentation: str | None = None
    special_tokens: bool = True


@dataclass(frozen=True, kw_only=True)
class PageWriter:
    """A class of a library that computes such models.

    Attributes:
        library: the one that has the class.
        model_class: its name, which `architectures` in config.json has.
        processor_class: that of its processor.
        backbones: the `model_type` of the vision-language models that it can have.
        wrapper: the `model_type` in config.json, which then has the backbone's configuration as `vlm_config`; None: it
            is that of the backbone.
        prefix: of the weights of the backbone.
        projection: the linear layer from tokens to vectors.
        dimension: of a vector; other than that of `*ForRetrieval`, it is fixed.
        has_axes: whether the positions of a page's tokens have several axes; else they count on, as those of a text.
        around: what stands around texts and pages.
    """

    library: PageLibrary
    model_class: str
    processor_class: str
    backbones: tuple[str, ...]
    wrapper: str | None = None
    prefix: str = ""
    projection: str = "custom_text_proj"
    dimension: int = 128
    has_axes: bool = True
    around: _Around

    def texts(
        self, stored: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, picture: str, where: Path
    ) -> PageTexts:
        """What stands around items.

        Args:
            stored: the content of `processor_config.json`, which has some of it in directories of transformers.
            picture: the token of pictures.
            where: the directory, for messages.

        A ModelError if the tokenizer does not have the tokens.
        """
        bos, pad = tokenizer.bos_token, self.around.augmentation or tokenizer.pad_token
        if not isinstance(pad, str) or pad not in tokenizer.get_vocab():
            raise ModelError(f"{where}: its tokenizer has no {pad or 'padding token'}, which stands behind queries")
        if not isinstance(bos, str) and "{bos}" in "".join((self.around.page, *self.around.query)):
            raise ModelError(f"{where}: its tokenizer has no bos_token, which stands before texts")
        page, before = self.around.page, self.around.query[0]
        if self.library is PageLibrary.transformers:
            if isinstance(own := stored.get("visual_prompt_prefix"), str) and own:
                page = self.around.page.replace("Describe the image.", own) if "{bos}" in self.around.page else own
            if isinstance(own := stored.get("query_prefix"), str):
                before = before.removesuffix(_default_prefix(before)) + own
        if page.count(picture) != 1:
            raise ModelError(f"{where}: visual_prompt_prefix={page!r:.100} must have {picture} once")
        filled = (
            part.replace("{bos}", str(bos)) for part in (before, self.around.query[1], *page.partition(picture)[::2])
        )
        before, after, start, end = filled
        bare = str(bos) if "{bos}" in self.around.query[0] else ""

        def around(first: str, last: str) -> ItemTemplate:
            return ItemTemplate(
                starts=(first, first),
                prompted=((first, ""), (first, "")),
                end=last,
                picture=picture,
                special_tokens=self.around.special_tokens,
            )

        query = around(before, pad * _NUM_AUGMENTATION + after)
        # Processors of transformers read every text as a query.
        document = query if self.library is PageLibrary.transformers else around(bare, "")
        return PageTexts(query=query, document=document, page=around(start, end))

    def stored_texts(self, texts: PageTexts, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """What `processor_config.json` has of these texts, for a class of transformers."""
        bos = str(tokenizer.bos_token)
        page = texts.page.starts[0] + texts.page.picture + texts.page.end
        if "{bos}" in self.around.page:
            page = texts.page.end.removeprefix(bos).removesuffix("\n")
        query = texts.query.starts[0].removeprefix(bos if "{bos}" in self.around.query[0] else "")
        return dict(zip(TEXT_KEYS, (query, page), strict=True))


def _default_prefix(before: str) -> str:
    return before.removeprefix("{bos}")


_TRANSFORMERS: dict[str, Any] = {
    "library": PageLibrary.transformers,
    "prefix": "vlm.",
    "projection": "embedding_proj_layer",
}
_COLPALI: dict[str, Any] = {"library": PageLibrary.colpali_engine}
WRITERS = (
    PageWriter(
        **_TRANSFORMERS,
        model_class="ColQwen2ForRetrieval",
        processor_class="ColQwen2Processor",
        wrapper="colqwen2",
        backbones=("qwen2_vl", "qwen2_5_vl"),  # of Qwen3-VL the class would drop the rows of inner layers
        has_axes=False,
        around=_Around(page=_QWEN_PAGE, query=("Query: ", "\n")),
    ),
    PageWriter(
        **_TRANSFORMERS,
        model_class="ColPaliForRetrieval",
        processor_class="ColPaliProcessor",
        wrapper="colpali",
        backbones=("paligemma",),
        around=_Around(page="<image>{bos}Describe the image.\n", query=("{bos}Question: ", "\n"), special_tokens=False),
    ),
    PageWriter(
        **_TRANSFORMERS,
        model_class="ColModernVBertForRetrieval",
        processor_class="ColModernVBertProcessor",
        wrapper="colmodernvbert",
        backbones=("modernvbert",),
        around=_Around(page=_MODERNVBERT_PAGE, augmentation=_ENDS_UTTERANCE),
    ),
    PageWriter(
        **_COLPALI,
        model_class="ColQwen2",
        processor_class="ColQwen2Processor",
        backbones=("qwen2_vl",),
        around=_Around(page=_QWEN_PAGE, augmentation=_ENDS_TEXT),
    ),
    PageWriter(
        **_COLPALI,
        model_class="ColQwen2_5",
        processor_class="ColQwen2_5_Processor",
        backbones=("qwen2_5_vl",),
        around=_Around(page=_QWEN_PAGE, augmentation=_ENDS_TEXT),
    ),
    PageWriter(
        **_COLPALI,
        model_class="ColQwen3",
        processor_class="ColQwen3Processor",
        backbones=("qwen3_vl",),
        dimension=320,
        around=_Around(page=_QWEN_PAGE, augmentation=_ENDS_TEXT),
    ),
    PageWriter(
        **_COLPALI,
        model_class="ColPali",
        processor_class="ColPaliProcessor",
        backbones=("paligemma",),
        prefix="model.model.",
        # one is its own, the other is added by PaliGemmaProcessor
        around=_Around(page="<image>{bos}{bos}Describe the image.\n", query=("{bos}", ""), special_tokens=False),
    ),
    PageWriter(
        **_COLPALI,
        model_class="ColIdefics3",
        processor_class="ColIdefics3Processor",
        backbones=("idefics3", "smolvlm"),
        prefix="model.",
        projection="linear",
        around=_Around(page=_IDEFICS_PAGE, augmentation=_ENDS_UTTERANCE),
    ),
    PageWriter(
        **_COLPALI,
        model_class="ColModernVBert",
        processor_class="ColModernVBertProcessor",
        backbones=("modernvbert",),
        prefix="model.",
        around=_Around(page=_MODERNVBERT_PAGE, augmentation=_ENDS_UTTERANCE),
    ),
)


def writer_of(directory: Path) -> PageWriter | None:
    """The class whose model a directory of transformers' format holds; None of other models."""
    path = directory / "config.json"
    names = read_json(path).get("architectures") if path.is_file() else None
    for writer in WRITERS:
        if isinstance(names, list) and writer.model_class in names:
            return writer
    return None


def writer_for(model_type: str, library: PageLibrary | None) -> PageWriter | None:
    """The class of a library for a vision-language model, by default of transformers; None if it has none."""
    found = [writer for writer in WRITERS if model_type in writer.backbones and library in (None, writer.library)]
    return found[0] if found else None


def describe(writer: PageWriter) -> str:
    """What a directory is, in words for a message."""
    return f"a {writer.model_class} of {writer.library.value.replace('_', '-')}"


def backbone_config(config: PretrainedConfig, writer: PageWriter, directory: Path) -> PretrainedConfig:
    """The configuration of the vision-language model; a ModelError if the class cannot have it."""
    backbone: PretrainedConfig = config if writer.wrapper is None else config.vlm_config
    if backbone.model_type not in writer.backbones:
        raise ModelError(
            f"{directory}: {writer.model_class} on {backbone.model_type} is not supported; supported is "
            f"{' and '.join(writer.backbones)}"
        )
    return backbone


def write_page_config(directory: Path, config: PretrainedConfig, writer: PageWriter, dimension: int) -> None:
    """Replace config.json of the backbone by that of the class."""
    path = directory / "config.json"
    stored = read_json(path)
    architectures = {"architectures": [writer.model_class]}
    if writer.wrapper is None:
        write_json(path, {**stored, **architectures})
        return
    made = CONFIG_MAPPING[writer.wrapper](vlm_config=stored, embedding_dim=dimension)
    made.save_pretrained(directory)
    write_json(path, read_json(path) | architectures | {"dtype": stored["dtype"]})


def stored_names(names: Iterable[str], writer: PageWriter) -> dict[str, str]:
    """Of weights of the backbone and the projection, by names of an encoder, the names in the files of the class."""
    found = {}
    for name in names:
        if name.startswith("backbone."):
            found[name] = writer.prefix + name.removeprefix("backbone.")
        elif name.startswith("dense.0.linear."):
            found[name] = f"{writer.projection}.{name.removeprefix('dense.0.linear.')}"
    return found


def backbone_keys(keys: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Of each weight of a backbone that files have, by its name in the backbone, its key in the files.

    Libraries wrap the backbone in modules of other names, and older versions of transformers had other names.
    """
    known, found = set(names), dict[str, str]()
    for key in keys:
        name = key
        while name not in known:
            wrapper = next((part for part in _WRAPPERS if name.startswith(part)), None)
            renamed = next((new + name.removeprefix(old) for old, new in _OLD_NAMES if name.startswith(old)), None)
            if wrapper is not None:
                name = name.removeprefix(wrapper)
            elif renamed is not None and renamed in known:
                name = renamed
            else:
                break
        if name in known:
            found.setdefault(name, key)
    return found


def projection_key(keys: Iterable[str], writer: PageWriter) -> str | None:
    """The name of the projection in files: that of the class, perhaps within others."""
    end = f"{writer.projection}.weight"
    found = sorted((key for key in keys if key == end or key.endswith(f".{end}")), key=len)
    return found[0].removesuffix(".weight") if found else None
