"""Model directories of late interaction over pages, which the class of one library opens.

Those of transformers' classes are opened by sentence-transformers as well. Each is compared with the vectors of its
class: those of colpali-engine where it is installed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModel

from embedtrain.config.kind_settings import PageLibrary
from embedtrain.data.images.settings import PROCESSOR_FILE
from embedtrain.data.tokens import UNLIMITED, TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import CheckpointError
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
from embedtrain.models.encoder import Encoder
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
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
    with torch.no_grad(), probe_items(layout, tokenizer.limit(TextRole.document), has_mixed=False) as pages:
        texts = [prompt + text for text in short_probes(tokenizer, prompts)]
        for items, of_items, role in ((texts, prompt, TextRole.query), (pages, "", TextRole.document)):
            tokens = tokenizer.tokens(items, None, of_items, role)
            chunks = (tokenizer.chunk(tokens, [row]).to(device) for row in range(len(tokens)))
            vectors += [encoder(chunk)[0].cpu() for chunk in chunks]
    return torch.cat(vectors)


def short_probes(tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> list[str]:
    """Those of PROBES that are not cut: libraries would cut what stands behind a text."""
    prompt, layout = prompts.get("query", ""), tokenizer.layout
    tokens = layout.tokenize([prompt + text for text in PROBES], UNLIMITED, prompt, TextRole.query)
    limit = tokenizer.limit(TextRole.query)
    return [text for text, length in zip(PROBES, tokens.lengths.tolist(), strict=True) if length <= limit]


def of_class(directory: Path, source: ModelSource, prompts: Mapping[str, str]) -> Tensor:
    """The vectors of `probe_pages` by transformers' class and its processor, one item at a time."""
    settings: PageVectors = source.settings
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
    with torch.no_grad(), probe_items(layout, own.limit(TextRole.document), has_mixed=False) as pages:
        queries = [processor.process_queries([prompt + text]) for text in short_probes(own, prompts)]
        for inputs in (*queries, *(processor.process_images(open_parts(page)) for page in pages)):
            given = {name: values for name, values in inputs.items() if name != "labels"}
            vectors = model(**given).embeddings[0]
            if settings.only_pictures and "pixel_values" in given:
                vectors = vectors[given["input_ids"][0] == source.config.image_token_id]
            rows.append(vectors)
    return torch.cat(rows).float()


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
        with probe_items(layout, own.limit(TextRole.document), has_mixed=False) as pages:
            queries = model.encode_query(short_probes(own, prompts), **options)
            documents = model.encode_document([open_parts(page)[0] for page in pages], **options)
        similarity = model.similarity_fn_name
    if similarity != settings.similarity.value:
        raise CheckpointError(
            f"sentence-transformers opens {directory} with the similarity {similarity}, not {settings.similarity.value}"
        )
    return torch.cat([torch.as_tensor(vectors).float().cpu() for vectors in (*queries, *documents)])
