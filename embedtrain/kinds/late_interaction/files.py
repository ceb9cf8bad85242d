"""Model directories of late-interaction models: of PyLate, or of sentence-transformers 6.

PyLate's is written, which sentence-transformers opens as well, unless the model has settings that PyLate does not have:
it would ignore them and compute other vectors. The directory of sentence-transformers 6 names modules that PyLate
cannot open.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedtrain.config.kind_settings import NO_PROJECTION, Expansion, PageLibrary, TokenVectors
from embedtrain.config.recipe import ADAPTER, ExportConfig
from embedtrain.config.validation import written
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, TextRole
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.model_files import (
    HIDDEN,
    TOKEN_VECTORS,
    ModelFiles,
    ServingOutputs,
    StoredName,
    comparison_block,
    python_block,
    rows_by_text,
    write_own_tokenizer,
)
from embedtrain.formats.page_models import writer_of
from embedtrain.formats.pylate import PYLATE_DENSE, pylate_settings, why_not_pylate
from embedtrain.formats.sentence_transformers import (
    BATCH_SIZE,
    MULTI_VECTOR,
    OLD_MODULE,
    PYLATE,
    SETTINGS,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    load_model,
    opening,
    write_modules,
)
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.dense.vision import probe_items
from embedtrain.kinds.late_interaction.model import TokenVectorLayout
from embedtrain.kinds.late_interaction.page_files import (
    MASK,
    of_class,
    of_multi_vector_encoder,
    page_names,
    page_shapes,
    page_usage,
    probe_pages,
    short_probes,
    write_pages,
)
from embedtrain.kinds.late_interaction.pages import PageLayout, of_pages
from embedtrain.losses.encoded import Part
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

_DENSE = "sentence_transformers.base.modules.dense.Dense"
_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}


class LateInteractionFiles(ModelFiles):
    """A backbone, projections, and settings of expansion, prefixes and the skip list."""

    plural = "late-interaction models"
    description = (
        "A late-interaction model: a vector of {dimension} dimensions for each token of a text or page of up to "
        "{max_length} tokens, and the sum of the largest similarities of a query's tokens as score"
    )
    tags = ("multi-vector", "ColBERT", "late-interaction", "feature-extraction")
    graph = (
        "from token ids to `last_hidden_state` and `token_embeddings`, the normalised vectors of all tokens: clients "
        "add the tokens that expand queries, and leave out padding and the words of the skip list"
    )
    encodes_plain_texts = False
    agreement = "smallest mean cosine of the vectors of a text"

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """The files with which other libraries compute the same vectors."""
        if of_pages(source):
            write_pages(directory, source, tokenizer)
            return
        write_own_tokenizer(directory, tokenizer)
        _write_settings(directory, source, tokenizer)

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """sentence-transformers 6, and PyLate if it opens the directory; of pages, the library of its class."""
        if (writer := writer_of(architecture)) is not None:
            return page_usage(name, writer)
        lines = comparison_block("MultiVectorEncoder", name, '["a text that answers it", "another text"]')
        settings = read_json(architecture / SETTINGS) if (architecture / SETTINGS).is_file() else {}
        if settings.get("model_type") != PYLATE:
            return [*lines, "PyLate cannot open this model, because it has settings that PyLate does not have.", ""]
        # PyLate prepends prompts if asked for them by name.
        by_name = [name for name, text in settings.get("prompts", {}).items() if text]
        query, document = (f', prompt_name="{role}"' if role in by_name else "" for role in ("query", "document"))
        return [
            *lines,
            "With PyLate:",
            "",
            *python_block(
                "from pylate import models, rank",
                "",
                f'model = models.ColBERT("{name}")',
                f'queries = model.encode(["a question"], is_query=True{query})',
                f'documents = model.encode([["a text that answers it", "another text"]], is_query=False{document})',
                'print(rank.rerank(documents_ids=[["1", "2"]], queries_embeddings=queries, '
                "documents_embeddings=documents))",
            ),
        ]

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """Of pages, the names of the class."""
        writer = writer_of(architecture)
        return super().stored_names(names, architecture) if writer is None else page_names(names, writer)

    def stored_shapes(self, source: ModelSource) -> dict[Path, dict[str, list[int]]]:
        """Of pages, with the names of the class."""
        return page_shapes(source) if of_pages(source) else super().stored_shapes(source)

    def verified_texts(self, texts: list[str], tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> list[str]:
        """Of pages, those that are not cut: no processor cuts them."""
        if not isinstance(tokenizer.layout, PageLayout):
            return texts
        kept = set(short_probes(tokenizer, prompts))
        return [text for text in texts if not text or text in kept]

    def probe_documents(self, tokenizer: TextTokenizer) -> AbstractContextManager[list[str]]:
        """Drawn pages, of a model over pages."""
        layout = tokenizer.layout
        if not isinstance(layout, PageLayout):
            return super().probe_documents(tokenizer)
        return probe_items(layout, tokenizer.limit(TextRole.document), has_mixed=False)

    def is_sentence_transformers(self, source: ModelSource) -> bool:
        """It opens classes of transformers, not those of colpali-engine."""
        return not of_pages(source) or source.settings.writer.library is PageLibrary.transformers

    def of_transformers(self, directory: Path, source: ModelSource) -> Tensor:
        """Of pages, by the class and its processor."""
        if of_pages(source):
            return of_class(directory, source, source.prompts)
        return super().of_transformers(directory, source)

    def no_graph(self, source: ModelSource) -> str:
        """Only texts have one."""
        if not of_pages(source):
            return super().no_graph(source)
        return f"a model over pages ({source.settings.writer.model_class}) has no ONNX graph"

    def check_export(self, config: ExportConfig, kind: str) -> None:
        """An adapter alone would lack the projection."""
        super().check_export(config, kind)
        if ADAPTER in config.formats:
            raise ConfigError(f"formats={written(config.formats)}: {NO_PROJECTION}")

    def probe(
        self, encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str], device: torch.device
    ) -> Tensor:
        """Vectors [R, D] of the tokens of each text as a query, then as a document, with their prompts."""
        if isinstance(tokenizer.layout, PageLayout):
            return probe_pages(encoder, tokenizer, prompts, device)
        vectors = []
        for role in (TextRole.query, TextRole.document):
            prompt = prompts.get(role.value, "")
            tokens = tokenizer.tokens([prompt + text for text in PROBES], None, prompt, role)
            chunks = (tokenizer.chunk(tokens, [row]).to(device) for row in range(len(tokens)))
            with torch.no_grad():
                vectors += [encoder(chunk)[0].cpu() for chunk in chunks]
        return torch.cat(vectors)

    def of_sentence_transformers(
        self,
        directory: Path,
        source: ModelSource,
        prompts: Mapping[str, str],
        max_length: int,
    ) -> Tensor | None:
        """Vectors of MultiVectorEncoder, which inserts prompts itself; the score is compared."""
        if of_pages(source):
            return of_multi_vector_encoder(directory, source, prompts, max_length)
        texts, options = list(PROBES), {"batch_size": BATCH_SIZE, "show_progress_bar": False}
        with opening(directory):
            model = load_model("MultiVectorEncoder", directory, source)
            queries, documents = model.encode_query(texts, **options), model.encode_document(texts, **options)
            similarity = model.similarity_fn_name
        if similarity != source.settings.similarity.value:
            raise CheckpointError(
                f"sentence-transformers opens {directory} with the similarity {similarity}, not "
                f"{source.settings.similarity.value}"
            )
        return torch.cat([torch.as_tensor(vectors).float().cpu() for vectors in (*queries, *documents)])

    def serving_facts(self, source: ModelSource, *, has_graph: bool) -> dict[str, bool]:
        """Which library has the class of a model over pages."""
        is_engine = of_pages(source) and source.settings.writer.library is PageLibrary.colpali_engine
        return {**super().serving_facts(source, has_graph=has_graph), "is_of_colpali_engine": is_engine}

    def serving_outputs(self, part: Part, source: ModelSource, way: str) -> ServingOutputs:
        """Vectors of the tokens of each text."""
        return {"token_vectors": {way: rows_by_text(part)}}

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """Vectors of all tokens."""
        if of_pages(source):
            return {}
        return {HIDDEN: "length", TOKEN_VECTORS: "length"}

    def graph_shapes(self, source: ModelSource, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """Vectors of all tokens."""
        if of_pages(source):
            return {}
        return {TOKEN_VECTORS: (texts, length, source.dimension)}

    def from_graph(
        self,
        source: ModelSource,
        rest: nn.Module | None,
        outputs: Sequence[Tensor],
        chunk: Chunk,
    ) -> Tensor:
        """Vectors [R, D] of the tokens that have one."""
        assert chunk.token_rows is not None
        return outputs[0].flatten(0, 1)[chunk.token_rows]

    def reduce(self, source: ModelSource, name: str, output: Tensor, mask: Tensor) -> list[Tensor]:
        """Vectors of the tokens of a text."""
        if name == HIDDEN:
            with torch.no_grad():
                output = self.add_heads(nn.Identity(), source).output.graph_outputs(output, mask)[0]
        return [row[is_real] for row, is_real in zip(output, mask.bool(), strict=True)]


def _write_settings(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    settings, layout = source.settings, tokenizer.layout
    assert isinstance(layout, TokenVectorLayout)
    words = [word for word in settings.skiplist_words if word not in layout.unknown_words]
    lengths = {"query": tokenizer.limit(TextRole.query), "document": tokenizer.limit(TextRole.document)}
    stored: dict[str, Any] = {"max_seq_length": tokenizer.max_length, "do_lower_case": False}
    top: dict[str, Any] = {"__version__": {}, "default_prompt_name": None}
    keys: dict[str, Any]
    if is_pylate := why_not_pylate(settings, tokenizer.tokenizer) is None:
        kinds, dense, keys = {"": OLD_MODULE + "Transformer"}, PYLATE_DENSE, {"use_residual": False}
        top |= pylate_settings(source, tokenizer.tokenizer, lengths, words)
    else:
        kinds, dense, keys = {"": TRANSFORMER_MODULE}, _DENSE, dict(_TOKENS)
        stored |= _transformer_settings(settings, lengths)
        prompts = {"query": "", "document": ""} | source.prompts
        top |= {"model_type": MULTI_VECTOR, "prompts": prompts, "similarity_fn_name": settings.similarity.value}
    for index, head in enumerate(source.vectors.dense, start=1):
        folder = f"{index}_Dense"
        kinds[folder] = dense
        sizes = {"in_features": head.num_in, "out_features": head.num_out, "bias": head.bias}
        write_json(directory / folder / "config.json", sizes | {"activation_function": head.activation} | keys)
    if not is_pylate:
        mask, normalize = (
            f"{len(kinds) + offset}_{name}" for offset, name in enumerate(("MultiVectorMask", "Normalize"))
        )
        kinds |= {mask: MASK, normalize: _NORMALIZE}
        tasks = ["query", "document"] if settings.skiplist_queries else ["document"]
        write_json(directory / mask / "config.json", {"skiplist_words": words, "skiplist_tasks": tasks})
        write_json(directory / normalize / "config.json", _TOKENS)
    write_modules(directory, kinds)
    write_json(directory / TRANSFORMER_SETTINGS, stored)
    write_json(directory / SETTINGS, top)


def _transformer_settings(settings: TokenVectors, lengths: Mapping[str, int]) -> dict[str, Any]:
    """What sentence-transformers 6 reads with the Transformer module."""
    expansion: Expansion | None = settings.expansion
    stored = {f"{role}_length": length for role, length in lengths.items()}
    if expansion is None:
        return stored
    values = {"attend": expansion.attend, "token": expansion.token, "length": expansion.length}
    # The length of expanded queries has precedence, and a smaller one beside it is an error.
    stored["query_length"] = max(stored["query_length"], expansion.length)
    return stored | {"query_expansion": {"strategy": expansion.strategy.value} | values}
