"""Model directories of dense models, and of static tables: sentence-transformers and transformers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedTokenizerBase

from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import ExportConfig, Pooling
from embedtrain.data.images.settings import PROCESSOR_FILE
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.model_files import (
    HIDDEN,
    POOLING_FOLDER,
    VECTORS,
    ModelFiles,
    comparison_block,
    python_block,
    shown_prompt,
    write_own_tokenizer,
)
from embedtrain.formats.sentence_transformers import (
    OLD_MODULE,
    SETTINGS,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    load_model,
    opening,
    read_pooling,
    write_modules,
    write_pooling,
)
from embedtrain.formats.static_embedding import STATIC_EMBEDDING, is_static, write_static_tokenizer
from embedtrain.formats.transformers import open_checked, resolve_max_length, tokenize_padded
from embedtrain.formats.verify import PROBES, probes_of_sentence_transformer
from embedtrain.kinds.dense.model import VisionLayout
from embedtrain.kinds.dense.options import CHUNKING_FILE
from embedtrain.kinds.dense.vision import (
    encode_pictures,
    encode_with_class,
    missing_packages,
    open_processor,
    probe_items,
    reads_pictures,
    vision_layout,
    write_processor,
)
from embedtrain.models.encoder import Encoder, hidden_size
from embedtrain.models.file_references import read_json
from embedtrain.models.pooling import build_pooling
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

_SIMILARITIES = {
    VectorSimilarity.cosine: "cosine similarity",
    VectorSimilarity.dot: "inner product (`dot`)",
    VectorSimilarity.euclidean: "Euclidean distance",
    VectorSimilarity.manhattan: "Manhattan distance",
}


def own_pooling(directory: Path) -> str | None:
    """The path of a user's class that pools the vectors of a directory; None of other poolings."""
    path = directory / POOLING_FOLDER / "config.json"
    pooling = read_pooling(path)[0] if path.is_file() else None
    return None if isinstance(pooling, Pooling) else pooling


def write_settings(directory: Path, source: ModelSource) -> None:
    """Write prompts and similarity for sentence-transformers."""
    settings = {
        "__version__": {},
        "prompts": {"query": "", "document": ""} | source.prompts,
        "default_prompt_name": None,
        "similarity_fn_name": source.vectors.similarity.value,
    }
    write_json(directory / SETTINGS, settings)


class DenseFiles(ModelFiles):
    """The modules Transformer, Pooling, Dense and Normalize of sentence-transformers, or StaticEmbedding."""

    plural = "models of one vector per text"
    description = "A text-embedding model with {dimension} dimensions for texts of up to {max_length} tokens"
    tags: ClassVar[Sequence[str]] = ("sentence-similarity", "feature-extraction")
    task = "sentence-similarity"
    graph = (
        "from token ids to `last_hidden_state` and, unless a prompt is left out of pooling, `sentence_embedding`, the "
        "vectors with everything applied"
    )
    agreement = "smallest cosine of a vector"

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """Modules by their oldest names."""
        static, modules = is_static(source.config), {"": "Transformer", POOLING_FOLDER: "Pooling"}
        settings: dict[str, Any] = {"max_seq_length": tokenizer.max_length, "do_lower_case": False}
        if static:
            write_static_tokenizer(directory, tokenizer.tokenizer, tokenizer.max_length)
            modules = {"": STATIC_EMBEDDING}
        elif reads_pictures(source):
            settings = write_processor(directory, source, tokenizer)
        else:
            write_own_tokenizer(directory, tokenizer)
        if not static:
            write_pooling(directory / POOLING_FOLDER, source)
            write_json(directory / TRANSFORMER_SETTINGS, settings)
        for dense in source.vectors.dense:
            folder = f"{len(modules)}_Dense"
            modules[folder] = "Dense"
            settings = {"in_features": dense.num_in, "out_features": dense.num_out, "bias": dense.bias}
            write_json(directory / folder / "config.json", settings | {"activation_function": dense.activation})
        if source.vectors.normalize:
            folder = f"{len(modules)}_Normalize"
            modules[folder] = "Normalize"
            (directory / folder).mkdir(exist_ok=True)
        types = {path: OLD_MODULE + kind for path, kind in modules.items()}
        if reads_pictures(source):
            types[""] = TRANSFORMER_MODULE  # versions before 6 read no pictures
        write_modules(directory, types)
        write_settings(directory, source)
        if source.vectors.late_chunking:
            write_json(directory / CHUNKING_FILE, {"late": True})

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """sentence-transformers, and the prompts for other software; embedtrain for a pooling of the user."""
        if (own := own_pooling(architecture)) is not None:
            module, _, class_name = own.partition(":")
            lines = python_block(
                "from embedtrain import load_encoder",
                f"from {module} import {class_name}",
                "",
                f'encoder = load_encoder("{name}", pooling={class_name})',
            )
            return [*lines, f"Vectors are pooled by `{own}`, a class that is no part of this directory.", ""]
        similarity = VectorSimilarity(read_json(architecture / SETTINGS)["similarity_fn_name"])
        compares = f"The model compares vectors by {_SIMILARITIES[similarity]}."
        if (architecture / PROCESSOR_FILE).is_file():
            items = '["a text", {"image": Image.open("page.png"), "text": "with a picture before it"}]'
            lines = ["Queries and documents are texts, pictures, or both; a prompt is a system message.", ""]
            if read_json(architecture / "config.json")["model_type"] == "paligemma":
                items = items.replace('"a text", ', "")
                lines[0] += " Its processor needs texts and pictures in calls of their own."
            lines += comparison_block("SentenceTransformer", name, items, first="from PIL import Image")
            prompts_of_system = [f"- {kind}: {shown_prompt(text)}" for kind, text in prompts.items() if text]
            return [*lines, compares, "", *prompts_of_system, *[""] * bool(prompts_of_system)]
        lines = [*comparison_block("SentenceTransformer", name, '["a text that answers it"]'), compares, ""]
        if any(prompts.values()):
            lines += [
                "`encode_query` and `encode_document` prepend the prompts that the model was trained with. Other "
                "software must prepend them too:",
                "",
                "| texts | prompt |",
                "| --- | --- |",
                *(f"| {kind} | {shown_prompt(text)} |" for kind, text in prompts.items() if text),
                "",
            ]
        return lines

    def missing_packages(self, source: ModelSource) -> list[str]:
        """Those that transformers needs for the processor of a vision-language model."""
        return missing_packages(source) if reads_pictures(source) else []

    def is_sentence_transformers(self, source: ModelSource) -> bool:
        """It knows no pooling of the user, and opens no processor of which transformers needs missing packages."""
        return not self.missing_packages(source) and isinstance(source.vectors.pooling, Pooling)

    def stored_shapes(self, source: ModelSource) -> dict[Path, dict[str, list[int]]]:
        """Those of a pooling of the user as well."""
        shapes, own = super().stored_shapes(source), build_pooling(source.vectors.pooling, hidden_size(source.config))
        directory = source.vectors.pooling_directory
        if own is not None and directory is not None:
            shapes[directory] = {name: list(weight.shape) for name, weight in own.state_dict().items()}
        return shapes

    def check_export(self, config: ExportConfig, kind: str) -> None:
        """Vectors may be cut."""

    def require_check(self, source: ModelSource) -> None:
        """The processor of SmolVLM needs a package for the durations of videos."""
        if "num2words" in (missing := self.missing_packages(source)):
            raise ConfigError(
                f"transformers cannot open an export of {source.config.model_type} without {', '.join(missing)}: "
                "install them, or write export.check=false"
            )

    def is_transformers(self, source: ModelSource) -> bool:
        """A table is none of its models."""
        return not is_static(source.config)

    def probe(
        self,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        prompts: Mapping[str, str],
        device: torch.device,
    ) -> Tensor:
        """Vectors without prompts, of texts and then of items with pictures: [N, D]."""
        layout = tokenizer.layout
        with torch.no_grad(), ExitStack() as stack:
            items = list(PROBES)
            if isinstance(layout, VisionLayout):
                items += stack.enter_context(probe_items(layout, tokenizer.max_length))
            tokens = tokenizer.tokens(items)
            chunks = [tokenizer.chunk(tokens, [row]).to(device) for row in range(len(tokens))]
            return torch.cat([encoder(chunk)[0].cpu() for chunk in chunks])

    def probe_opened(
        self,
        encoder: Encoder,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Tensor:
        """Vectors [N, D] of the tokens that transformers computes."""
        if reads_pictures(source):
            return ModelFiles.probe_opened(self, encoder, source, tokenizer)
        batches = (tokenize_padded(tokenizer, [text]) for text in PROBES)
        encoder.eval()
        with torch.no_grad():
            return torch.cat([encoder(Chunk(batch["input_ids"], batch["attention_mask"]))[0] for batch in batches])

    def of_transformers(self, directory: Path, source: ModelSource) -> Tensor:
        """Pictures are read by the processor of transformers."""
        if not reads_pictures(source):
            return super().of_transformers(directory, source)
        model, processor = open_checked(AutoModel, directory, source), open_processor(directory, source)
        heads = self.add_heads(nn.Identity(), source).output
        layout = vision_layout(source, processor.tokenizer)
        length = resolve_max_length(source, processor.tokenizer)
        with torch.no_grad(), probe_items(layout, length) as items:
            return encode_with_class(model.eval(), processor, [*PROBES, *items], source, heads, length)

    def of_sentence_transformers(
        self, directory: Path, source: ModelSource, prompts: Mapping[str, str], max_length: int
    ) -> Tensor:
        """Vectors of SentenceTransformer; prompts and lengths are compared."""
        with opening(directory):
            model = load_model("SentenceTransformer", directory, source)
            vectors = probes_of_sentence_transformer(model)
            stored, length = dict(model.prompts), model.max_seq_length
            if reads_pictures(source):
                vectors = torch.cat([vectors, encode_pictures(model, source, length)])
        for name, text in prompts.items():
            if stored.get(name) != text:
                raise CheckpointError(
                    f"sentence-transformers opens {directory} with the prompt {name}={stored.get(name)!r}, not {text!r}"
                )
        # A StaticEmbedding cuts texts in its tokenizer, and reports no length.
        if length != max_length and not is_static(source.config):
            raise CheckpointError(
                f"sentence-transformers opens {directory} for texts of {length} tokens, not {max_length}"
            )
        return vectors

    def serving_facts(self, source: ModelSource, *, has_graph: bool) -> dict[str, bool]:
        """What engines that pool by themselves may lose."""
        is_truncated = source.vectors.truncate_dim is not None and source.vectors.truncate_dim < source.dimension
        return {
            "dense": bool(source.vectors.dense),
            "include_prompt": not source.vectors.include_prompt and any(source.prompts.values()),
            "no_vectors_in_graph": has_graph and VECTORS not in self.graph_outputs(source),
            "own_pooling": not isinstance(source.vectors.pooling, Pooling),
            "other_pooling": source.vectors.pooling in (Pooling.max, Pooling.weighted_mean),
            "vector_length": is_truncated or not source.vectors.normalize,
        }

    def no_graph(self, source: ModelSource) -> str:
        """Only texts have one."""
        if not reads_pictures(source):
            return super().no_graph(source)
        return (
            f"a vision-language model ({source.config.model_type}) has no ONNX graph; sentence-transformers and "
            "transformers open its export"
        )

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """Without the tokens of the prompt (`include_prompt=false`) vectors would need a mask that no client passes."""
        if reads_pictures(source):
            return {}
        if source.vectors.late_chunking:  # the tokens of each chunk are pooled
            return {HIDDEN: "length"}
        has_vectors = source.vectors.include_prompt or not any(source.prompts.values())
        return {HIDDEN: "length", VECTORS: None} if has_vectors else {HIDDEN: "length"}

    def traced(self, source: ModelSource, encoder: Encoder | None, output: Any, mask: Tensor) -> tuple[Tensor, ...]:
        """Vectors have the first `truncate_dim` dimensions."""
        assert encoder is not None
        hidden = output.last_hidden_state
        if VECTORS not in self.graph_outputs(source):
            return (hidden,)
        return hidden, encoder.output.graph_outputs(hidden, mask)[0][:, : source.vectors.truncate_dim]

    def graph_shapes(self, source: ModelSource, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """Vectors, or hidden states that are pooled without the tokens of the prompt."""
        if reads_pictures(source):
            return {}
        if VECTORS not in self.graph_outputs(source):
            return {HIDDEN: (texts, length, hidden_size(source.config))}
        return {VECTORS: (texts, min(source.dimension, source.vectors.truncate_dim or source.dimension))}

    def open_rest(self, source: ModelSource) -> nn.Module | None:
        """Pooling and heads, if the graph has only hidden states."""
        return None if VECTORS in self.graph_outputs(source) else self.add_heads(nn.Identity(), source)

    def from_graph(
        self,
        source: ModelSource,
        rest: nn.Module | None,
        outputs: Sequence[Tensor],
        chunk: Chunk,
    ) -> Tensor:
        """Vectors [N, D]."""
        if not isinstance(rest, Encoder):
            return outputs[0]
        return rest.output(outputs[0], chunk)[0]
