"""Model directories of late interaction over pages, which the class of one library opens.

Those of transformers' classes are opened by sentence-transformers as well. Each is compared with the vectors of its
class, one of colpali-engine with those of the class of transformers that it is derived from, and its projection.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModel

from embedtrain.config.kind_settings import PageLibrary
from embedtrain.data.images.processing import QwenPatches
from embedtrain.data.images.settings import PROCESSOR_FILE
from embedtrain.data.tokens import UNLIMITED, TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import CheckpointError
from embedtrain.formats.chat_template import ItemTemplate
from embedtrain.formats.model_files import StoredName, comparison_block, python_block
from embedtrain.formats.page_models import PageWriter, stored_names, write_page_config
from embedtrain.formats.sentence_transformers import (
    BATCH_SIZE,
    MULTI_VECTOR,
    SETTINGS,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    load_model,
    opening,
    write_modules,
)
from embedtrain.formats.transformers import open_checked, open_tokenizer, resolve_max_length, write_tokenizer
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.dense.vision import open_image_processor, open_parts, probe_items
from embedtrain.kinds.late_interaction.pages import PageLayout, PageVectors
from embedtrain.models.build import assemble_encoder, build_encoder, locate_weights
from embedtrain.models.encoder import Encoder
from embedtrain.models.stored_weights import read_tensor
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
_SHORT = 64  # tokens of a text that is compared
_OUTPUT = {"method": "forward", "method_output_name": "embeddings"}


def write_pages(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """Write the configuration of the class, its processor, and what sentence-transformers reads of classes that it has.

    The directory has the configuration of the backbone.
    """
    settings: PageVectors = source.settings
    write_page_config(directory, source.config, settings.writer, source.dimension)
    write_tokenizer(directory, tokenizer.tokenizer, tokenizer.max_length)
    write_json(directory / PROCESSOR_FILE, dict(settings.vision.processor))
    if settings.writer.library is not PageLibrary.transformers:
        return
    stored: dict[str, Any] = {
        "transformer_task": "retrieval",
        "modality_config": {"text": _OUTPUT, "image": _OUTPUT},
        "module_output_name": "token_embeddings",
        "max_seq_length": tokenizer.max_length,
        "unpad_inputs": False,
    }
    kept = [int(source.config.image_token_id)] if settings.only_pictures else None
    mask = {"skiplist_words": [], "skiplist_tasks": ["document"], "keep_only_token_ids": kept}
    prompts = {"query": "", "document": ""} | source.prompts
    top = {"__version__": {}, "model_type": MULTI_VECTOR, "prompts": prompts, "default_prompt_name": None}
    write_modules(directory, {"": TRANSFORMER_MODULE, "1_MultiVectorMask": MASK})
    write_json(directory / TRANSFORMER_SETTINGS, stored)
    write_json(directory / "1_MultiVectorMask" / "config.json", mask)
    write_json(directory / SETTINGS, top | {"similarity_fn_name": settings.similarity.value})


def page_usage(name: str, writer: PageWriter) -> list[str]:
    """How the libraries open the model and compare a query with pages."""
    if writer.library is PageLibrary.transformers:
        lines = comparison_block(
            "MultiVectorEncoder",
            name,
            '[Image.open("page.png"), Image.open("other.png")]',
            first="from PIL import Image",
        )
        return ["Queries are texts, and documents are pictures of pages.", "", *lines]
    lines = python_block(
        f"from colpali_engine.models import {writer.model_class}, {writer.processor_class}",
        "from PIL import Image",
        "",
        f'model = {writer.model_class}.from_pretrained("{name}").eval()',
        f'processor = {writer.processor_class}.from_pretrained("{name}")',
        'queries = model(**processor.process_queries(["a question"]))',
        'pages = model(**processor.process_images([Image.open("page.png")]))',
        "print(processor.score_multi_vector(list(queries), list(pages)))",
    )
    return ["Queries are texts, and documents are pictures of pages. With colpali-engine:", "", *lines]


def page_names(names: Iterable[str], writer: PageWriter) -> dict[str, StoredName]:
    """Of each weight of the encoder, its name in the directory."""
    return {name: StoredName(stored) for name, stored in stored_names(names, writer).items()}


def page_shapes(source: ModelSource) -> dict[Path, dict[str, list[int]]]:
    """The weights of a directory with their shapes, by its configuration."""
    assert source.directory is not None
    with init_empty_weights(include_buffers=False):
        backbone = AutoModel.from_config(source.config, trust_remote_code=source.trust_remote_code)
    (dense,) = source.vectors.dense
    shapes = {f"backbone.{name}": list(tensor.shape) for name, tensor in backbone.state_dict().items()}
    shapes |= {"dense.0.linear.weight": [dense.num_out, dense.num_in], "dense.0.linear.bias": [dense.num_out]}
    names = stored_names(shapes, source.settings.writer)
    return {source.directory: {names[name]: shape for name, shape in shapes.items()}}


def probe_pages(encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str], device: torch.device) -> Tensor:
    """Vectors [R, D] of the tokens of PROBES as queries, with their prompt, and then of drawn pages."""
    layout, prompt = tokenizer.layout, prompts.get("query", "")
    assert isinstance(layout, PageLayout)
    vectors = []
    with torch.no_grad(), probe_items(layout, _page_limit(tokenizer), has_mixed=False) as pages:
        texts = [prompt + text for text in short_probes(tokenizer, prompts)]
        for items, of_items, role in ((texts, prompt, TextRole.query), (pages, "", TextRole.document)):
            tokens = layout.tokens(items, UNLIMITED, of_items, role)
            chunks = (tokenizer.chunk(tokens, [row]).to(device) for row in range(len(tokens)))
            vectors += [encoder(chunk)[0].cpu() for chunk in chunks]
    return torch.cat(vectors)


def short_probes(tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> list[str]:
    """Those of PROBES that no library cuts, for it would cut what stands behind a text.

    The lengths of queries and, for colpali-engine, of documents are no part of a directory, so these do not count.
    """
    prompt, layout = prompts.get("query", ""), tokenizer.layout
    tokens = layout.tokenize([prompt + text for text in PROBES], UNLIMITED, prompt, TextRole.query)
    limit = min(_SHORT, tokenizer.max_length)
    return [text for text, length in zip(PROBES, tokens.lengths.tolist(), strict=True) if length <= limit]


def _page_limit(tokenizer: TextTokenizer) -> int:
    """The most tokens of a drawn page that is compared."""
    layout = tokenizer.layout
    assert isinstance(layout, PageLayout)
    is_engine = layout.settings.writer.library is PageLibrary.colpali_engine
    return UNLIMITED if is_engine else tokenizer.max_length


def of_class(directory: Path, source: ModelSource, prompts: Mapping[str, str]) -> Tensor:
    """The vectors of `probe_pages` by transformers' class and its processor, one item at a time."""
    settings: PageVectors = source.settings
    if settings.writer.library is PageLibrary.colpali_engine:
        return _of_base_class(directory, source, prompts)
    model = open_checked(getattr(transformers, settings.writer.model_class), directory, source).eval()
    tokenizer = open_tokenizer(directory, source)
    stored = settings.vision.processor
    options = {
        name: stored[name] for name in ("image_seq_len", "query_prefix", "visual_prompt_prefix") if name in stored
    }
    processor_class = getattr(transformers, settings.writer.processor_class)
    layout = PageLayout(source, open_tokenizer(directory, source))
    own = TextTokenizer(layout.tokenizer, resolve_max_length(source, layout.tokenizer), layout)
    processor = processor_class(open_image_processor(directory, source), tokenizer, **options)
    prompt, rows = prompts.get("query", ""), []
    with torch.no_grad(), probe_items(layout, _page_limit(own), has_mixed=False) as pages:
        queries = [processor.process_queries([prompt + text]) for text in short_probes(own, prompts)]
        for inputs in (*queries, *(processor.process_images(open_parts(page)) for page in pages)):
            given = {name: values for name, values in inputs.items() if name != "labels"}
            vectors = model(**given).embeddings[0]
            if settings.only_pictures and "pixel_values" in given:
                vectors = vectors[given["input_ids"][0] == source.config.image_token_id]
            rows.append(vectors)
    return torch.cat(rows).float()


def _of_base_class(directory: Path, source: ModelSource, prompts: Mapping[str, str]) -> Tensor:
    """The same of a class of colpali-engine: transformers' class computes positions, pictures and attention."""
    model = AutoModel.from_config(source.config).eval()
    located = locate_weights(source, {name: t.shape for name, t in build_encoder(source).state_dict().items()})
    stored = {name: read_tensor(location).float() for name, location in (located or {}).items()}
    model.load_state_dict({name: stored[f"backbone.{name}"] for name in model.state_dict()})
    weight, bias = (stored[f"dense.0.linear.{name}"] for name in ("weight", "bias"))
    tokenizer = open_tokenizer(directory, source)
    layout = PageLayout(source, tokenizer)
    own = TextTokenizer(tokenizer, resolve_max_length(source, tokenizer), layout)
    image_processor, prompt, rows = open_image_processor(directory, source), prompts.get("query", ""), []
    kept = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    with torch.no_grad(), probe_items(layout, _page_limit(own), has_mixed=False) as pages:
        queries = [prompt + text for text in short_probes(own, prompts)]
        for items, of_items, role in ((queries, prompt, TextRole.query), (pages, "", TextRole.document)):
            tokens = layout.tokens(items, UNLIMITED, of_items, role)
            for row, item in enumerate(items):
                ids = own.chunk(tokens, [row]).ids
                given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                if role is TextRole.document:
                    made = image_processor(open_parts(item), return_tensors="pt")
                    given |= {name: made[name] for name in kept if name in made}
                if isinstance(layout.processing, QwenPatches):
                    given["mm_token_type_ids"] = (ids == source.config.image_token_id).long()
                hidden = model(**given).last_hidden_state[0]
                rows.append(F.normalize(F.linear(hidden, weight, bias), dim=-1))
    return torch.cat(rows)


def of_multi_vector_encoder(
    directory: Path, source: ModelSource, prompts: Mapping[str, str], max_length: int
) -> Tensor | None:
    """The vectors of `probe_pages` by sentence-transformers; None if it cannot encode pages.

    Version 6.2 hands ColModernVBERT's processor pictures alone, which then has no text around them.
    """
    settings: PageVectors = source.settings
    if settings.writer.wrapper == "colmodernvbert":
        return None
    options = {"batch_size": BATCH_SIZE, "show_progress_bar": False}
    with opening(directory):
        model = load_model("MultiVectorEncoder", directory, source)
        layout = PageLayout(source, open_tokenizer(directory, source))
        own = TextTokenizer(layout.tokenizer, max_length, layout)
        with probe_items(layout, _page_limit(own), has_mixed=False) as pages:
            queries = model.encode_query(short_probes(own, prompts), **options)
            documents = model.encode_document([open_parts(page)[0] for page in pages], **options)
        similarity = model.similarity_fn_name
    if similarity != settings.similarity.value:
        raise CheckpointError(
            f"sentence-transformers opens {directory} with the similarity {similarity}, not {settings.similarity.value}"
        )
    return torch.cat([torch.as_tensor(vectors).float().cpu() for vectors in (*queries, *documents)])


def page_conversion_notes(source: ModelSource, converted: ModelSource, weights: Mapping[str, Tensor]) -> list[str]:
    """Lines for the user about what `convert_pages` changes: texts around items, positions, and vectors of probes."""
    old, new, changes = source.settings, converted.settings, []
    for name in ("query", "document", "page"):
        before, after = (getattr(settings.texts, name) for settings in (old, new))
        if before != after:
            what = "a text as a document" if name == "document" else f"a {name}"
            changes.append(f"around {what}: {' becomes '.join(map(_shown, (before, after)))}")
    if old.vision.has_axes != new.vision.has_axes and isinstance(old.vision.processing, QwenPatches):
        axes = ("of one axis, as in a text", "of three axes")
        changes.append(f"positions in a page: {axes[old.vision.has_axes]} become {axes[new.vision.has_axes]}")
    if not changes:
        return [f"{new.writer.model_class} computes the same as {old.writer.model_class}"]
    sides = []
    for side in (source, converted):
        encoder = assemble_encoder(side)
        encoder.load_state_dict(dict(weights))
        sides.append(_probe_rows(encoder.eval(), side))
    lines = [f"{new.writer.model_class} computes other vectors than {old.writer.model_class}", *changes]
    for role, before, after in zip(("queries", "pages"), *sides, strict=True):
        both = [item for item in before if item in after]  # a side may cut more of them
        if not both:
            continue
        cosines = torch.cat([_cosines(before[item], after[item]) for item in both])
        lines.append(
            f"vectors of the same tokens of {len(both)} probe {role}: cosine {cosines.mean():.4f} in the mean, "
            f"{cosines.min():.4f} at least"
        )
    return lines


def _shown(around: ItemTemplate) -> str:
    """What stands around an item, with a token that is repeated written once."""
    end = re.sub(r"(<[^<>]+>)\1+", lambda found: f"{len(found[0]) // len(found[1])} x {found[1]}", around.end)
    return f"{around.starts[0]!r} ... {end!r}"


def _probe_rows(encoder: Encoder, source: ModelSource) -> list[dict[str, tuple[list[int], Tensor]]]:
    """The ids and the vectors [R, D] of the tokens of PROBES as queries, and of drawn pages, by item."""
    assert source.directory is not None
    tokenizer = open_tokenizer(source.directory, source)
    layout = PageLayout(source, tokenizer)
    own = TextTokenizer(tokenizer, resolve_max_length(source, tokenizer), layout)
    rows = []
    with torch.no_grad(), probe_items(layout, _page_limit(own), has_mixed=False) as pages:
        for items, role in ((short_probes(own, {}), TextRole.query), (pages, TextRole.document)):
            tokens = layout.tokens(items, UNLIMITED, "", role)
            chunks = [own.chunk(tokens, [row]) for row in range(len(tokens))]
            of_items = [(chunk.ids[0].tolist(), encoder(chunk)[0]) for chunk in chunks]
            rows.append(dict(zip(items, of_items, strict=True)))
    return rows


def _cosines(before: tuple[list[int], Tensor], after: tuple[list[int], Tensor]) -> Tensor:
    """Cosines [R] of the vectors of the tokens that both sides have, in order."""
    blocks = SequenceMatcher(None, before[0], after[0], autojunk=False).get_matching_blocks()
    return torch.cat([(before[1][i : i + n] * after[1][j : j + n]).sum(dim=1) for i, j, n in blocks])
