"""Rerankers of texts and pictures: vision-language models whose score is the logit of tokens after a pair.

A query and a document are items of texts and pictures, formatted and joined as those of `model.py` are. No class of
transformers has such a score, so the head is a linear layer on the last token, and an export is the class that predicts
tokens, with sentence-transformers' LogitScore: the score is one row of its vocabulary head minus another.

N: pairs; T: texts; H: hidden size; V: tokens of the vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.checkpoint.tensor_files import DTYPES_BY_NAME, RowWriter, TensorSpec, file_layout
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.data.chunks import FurtherCosts
from embedtrain.data.images.files import PICTURES
from embedtrain.data.images.item import Picture, described, has_pictures
from embedtrain.data.tokens import UNLIMITED, TextTokenizer
from embedtrain.data.types import PICTURE, BatchTokens, Chunk, EncoderInputs, Pair, TextRole, Tokens
from embedtrain.errors import DataError
from embedtrain.formats.sentence_transformers import (
    CROSS_ENCODER,
    SETTINGS,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    WEIGHTS,
    write_modules,
)
from embedtrain.kinds.cross_encoder.model import VOCABULARY_HEAD, PairFormat, PairLayout
from embedtrain.kinds.dense.model import VisionLayout
from embedtrain.kinds.dense.vision import open_parts, probe_items, vision_layout, write_processor
from embedtrain.models.encoder import Head
from embedtrain.models.file_references import read_json
from embedtrain.models.own_class import HEAD
from embedtrain.models.pooling import POOLING, PooledTokens, at_least_float32
from embedtrain.models.stored_weights import stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

LOGIT_SCORE_MODULE_FOLDER = "1_LogitScore"
LOGIT_SCORE_MODULE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
SCORE_KEY = "weight"  # of the score, until it is a row of the vocabulary head


class VisionPairLayout(PairLayout, VisionLayout):
    """Pairs of items with pictures: only texts are cut, that of the document first.

    Args:
        items: the layout of single items of the model.
        pair_format: the format that the model is trained with.
    """

    roles_differ: ClassVar[bool] = False

    def __init__(self, items: VisionLayout, pair_format: PairFormat) -> None:
        (max_patches,) = items.further_limits
        VisionLayout.__init__(
            self, items.tokenizer, items.processing, items.family, items.markup, max_patches=max_patches
        )
        self.pair_format, self.second_type = pair_format, 0
        self.num_pair_tokens = pair_format.num_special

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of items, which `query_prompt` and `document_prompt` have formatted, with slots of pictures.

        A DataError for pictures that alone leave no room for a pair, or that the model cannot read.
        """
        items = self.parts([str(text) for text in texts], limit)
        for item in items:
            pictures = [part for part in item if isinstance(part, Picture)]
            length = sum(map(self._checked, pictures)) + self.pair_format.num_special
            if pictures and length > limit:
                raise DataError(self._too_large(pictures, length, limit))
        tokens = Tokens.of_parts(items)
        return self._without(tokens, np.maximum(0, self.num_tokens(tokens) - limit))

    def tokens(
        self, texts: Sequence[str] | Sequence[Pair], limit: int, prompts: str | Sequence[str], role: TextRole
    ) -> Tokens:
        """The tokens of items, or of pairs; a pair with pictures is no window, see `windows`."""
        whole = [
            text._replace(start=None) if isinstance(text, Pair) and has_pictures(text.query + text.document) else text
            for text in texts
        ]
        is_window = np.array([isinstance(text, Pair) and text.start is not None for text in whole], dtype=np.bool_)
        parts = [part for part in (np.flatnonzero(is_window), np.flatnonzero(~is_window)) if len(part)]
        if len(parts) < 2:
            return PairLayout.tokens(self, cast(Sequence[Pair], whole), limit, prompts, role)
        of_parts = [
            PairLayout.tokens(self, cast(Sequence[Pair], [whole[n] for n in part.tolist()]), limit, prompts, role)
            for part in parts
        ]
        return Tokens.concatenated(of_parts).take(np.argsort(np.concatenate(parts)))

    def join(self, queries: Tokens, documents: Tokens, max_length: int) -> Tokens:
        """N pairs from the tokens of their items, in which a picture is a slot."""
        items = Tokens.concatenated([queries, documents])
        first, second = np.arange(len(queries)), np.arange(len(queries), len(items))
        kept = np.concatenate(self._kept(items, first, second, max_length))
        cut = self._without(items, self.num_tokens(items) - kept)
        return self.pair_format.surround(cut.take(first), cut.take(second))

    def check_rows(self, tokens: Tokens, num_documents: NDArray[np.int64], max_length: int) -> None:
        """A DataError for a pair whose pictures have no room."""
        queries = np.cumsum(1 + num_documents) - 1 - num_documents
        documents = np.delete(np.arange(len(tokens)), queries)
        self._kept(tokens, np.repeat(queries, num_documents), documents, max_length)

    def _kept(
        self, items: Tokens, queries: NDArray[np.int64], documents: NDArray[np.int64], max_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that N pairs of these items keep of their queries and documents, no fewer than those of pictures.

        int64 [N] each. A DataError for a pair whose pictures have no room.
        """
        lengths, room = self.num_tokens(items), max_length - self.pair_format.num_special
        pictures = lengths - items.lengths + items.count(PICTURE)
        of_query, of_document = pictures[queries], pictures[documents]
        kept, _ = self.pair_format.fit(lengths[queries], lengths[documents], max_length)
        kept = np.maximum(np.minimum(kept, room - of_document), of_query)
        for number in np.flatnonzero((of_query + of_document > room) & (of_query + of_document > 0))[:1].tolist():
            of_pair = items.take([queries[number], documents[number]]).slots().pictures()
            length = int(of_query[number] + of_document[number]) + self.pair_format.num_special
            raise DataError(self._too_large(of_pair, length, max_length))
        return kept, np.minimum(lengths[documents], room - kept)

    def _too_large(self, pictures: Sequence[Picture], length: int, limit: int) -> str:
        sizes = " and ".join(f"{PICTURES.place(part)} ({part.width} x {part.height} pixels)" for part in pictures)
        return (
            f"{sizes} of a pair of query and document: {length} tokens with what stands around both, and "
            f"{model_option('max_length')}={limit}; pictures are not cut: raise it, or make them smaller"
        )

    def _without(self, tokens: Tokens, fewer: NDArray[np.int64]) -> Tokens:
        """Items without so many tokens of their texts, int64 [N], where the tokenizer cuts texts."""
        if not fewer.any():
            return tokens
        is_text = tokens.flags & PICTURE == 0
        counts = tokens.lengths - tokens.count(PICTURE)
        before = np.cumsum(is_text) - is_text - np.repeat(np.cumsum(counts) - counts, tokens.lengths)
        if self.pair_format.from_left:
            keeps = before >= np.repeat(fewer, tokens.lengths)
        else:
            keeps = before < np.repeat(counts - fewer, tokens.lengths)
        keeps |= ~is_text
        return Tokens(tokens.ids[keeps], tokens.flags[keeps], tokens.lengths - fewer)

    def windows(self, items: Sequence[Pair], max_length: int) -> NDArray[np.int64]:
        """Those of pairs of texts; a DataError for a pair with pictures that would take several."""
        has = np.array([has_pictures(pair.query) or has_pictures(pair.document) for pair in items], dtype=np.bool_)
        whole = self.are_whole(items, max_length)
        for number in np.flatnonzero(has & ~whole).tolist():
            query, document = (described(text) for text in items[number][:2])
            raise DataError(
                f"the pair of {query!r:.80} and {document!r:.80} has more than {max_length} tokens, and a pair with "
                "pictures is not read in windows: leave document_windows out, or raise max_length"
            )
        return np.where(has[:, None], 1, super().windows(items, max_length))

    def are_whole(self, pairs: Sequence[Pair], max_length: int) -> NDArray[np.bool_]:
        """For each pair, whether neither of its items is cut: bool [N]."""
        items, first = Tokens.concatenated(self._contents(pairs, UNLIMITED)), np.arange(len(pairs))
        kept = np.concatenate(self._kept(items, first, len(pairs) + first, max_length))
        whole: NDArray[np.bool_] = (kept == self.num_tokens(items)).reshape(2, -1).all(axis=0)
        return whole

    def inputs(self, tokens: BatchTokens, max_length: int) -> EncoderInputs:
        """The M pairs of a batch: each document with the query of its row, and what the vision tower computes."""
        num_rows = len(tokens.num_documents)
        rows = np.repeat(np.arange(num_rows), tokens.num_documents)
        documents = num_rows + np.arange(len(rows))
        texts = tokens.tokens(np.arange(num_rows + len(rows)))
        vision, patches = self.chunk_costs(texts) - self.num_tokens(texts), self.further_costs(texts)

        def selected(inputs: NDArray[np.int64]) -> Tokens:
            return self.join(tokens.tokens(rows[inputs]), tokens.tokens(documents[inputs]), max_length)

        lengths = np.add(*self._kept(texts, rows, documents, max_length)) + self.pair_format.num_special
        return EncoderInputs(
            num_queries=0,
            rows=rows,
            lengths=lengths,
            costs=lengths + vision[rows] + vision[documents],
            sizes=(None,),
            tokens=selected,
            further=FurtherCosts(patches[rows] + patches[documents], self.further_limits),
        )

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of an item besides the tokenizer and lengths."""
        return (*super().identity, *super(PairLayout, self).identity, self.pair_format.num_special)


def vision_pairs(source: ModelSource, tokenizer: PreTrainedTokenizerBase, pair_format: PairFormat) -> VisionPairLayout:
    """How pairs become tokens and rows of a chunk."""
    return VisionPairLayout(vision_layout(source, tokenizer), pair_format)


class LinearScore(nn.Module):
    """A linear layer without a bias: [N, H] -> [N, 1]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.score = nn.Linear(size, 1, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """[N, H] -> [N, 1]."""
        scores: Tensor = self.score(vectors)
        return scores


class TokenScoreHead(Head):
    """The score of pairs, a linear layer on the last token: the logit of a token, or the difference of two.

    In float32 whatever the precision of the backbone, as `ScoreHead`.

    Args:
        size: H.
    """

    dimension = 1
    reads_pairs = True

    def __init__(self, size: int) -> None:
        layer = LinearScore(size)
        self.modules: dict[str, nn.Module] = {HEAD.rstrip("."): layer}
        self.in_float32 = layer

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The scores of pairs, [N, 1]."""
        assert self.in_float32 is not None
        vectors = self.compared(hidden, chunk).to(next(self.in_float32.parameters()).dtype)
        return (at_least_float32(self.in_float32(vectors)),)

    def compared(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """The vectors of the last tokens [N, H], because scores near 0 have no relative difference."""
        hidden = hidden if chunk.packing is None else hidden[0]
        return POOLING[Pooling.last].pool(hidden, PooledTokens.of(chunk))


# Directories


def answer_class(config: PretrainedConfig) -> Any:
    """Transformers' class that predicts the tokens behind texts and pictures."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def write_settings(directory: Path, source: ModelSource, tokenizer: TextTokenizer, chat_template: str) -> None:
    """Write tokenizer, chat template and processor, and the modules Transformer and LogitScore."""
    vision = replace(source.settings.vision, chat_template=chat_template)
    settings = write_processor(directory, replace(source, settings=vision), tokenizer)
    output = {"method": "forward", "method_output_name": "logits"}
    settings |= {
        "transformer_task": "any-to-any",
        "modality_config": {"text": output, "image": output, "message": output | {"format": "structured"}},
        "module_output_name": "causal_logits",
        "max_seq_length": tokenizer.max_length,
    }
    write_json(directory / TRANSFORMER_SETTINGS, settings)
    write_modules(directory, {"": TRANSFORMER_MODULE, LOGIT_SCORE_MODULE_FOLDER: LOGIT_SCORE_MODULE})
    first, *second = source.settings.tokens
    ids = {"true_token_id": first, "false_token_id": second[0] if second else None}
    write_json(directory / LOGIT_SCORE_MODULE_FOLDER / "config.json", ids | {"module_input_name": "causal_logits"})
    config: dict[str, Any] = read_json(directory / "config.json")
    # The vocabulary head has rows of its own, see `write_scores`.
    text = config.get("text_config") or {}
    untied = {"tie_word_embeddings": False, "text_config": text | {"tie_word_embeddings": False}}
    write_json(directory / "config.json", config | untied | {"architectures": [answer_class(source.config).__name__]})
    activation = {"activation_fn": source.settings.activation}
    ours: dict[str, Any] = {"__version__": {}, "model_type": CROSS_ENCODER, "default_prompt_name": None, "prompts": {}}
    write_json(directory / SETTINGS, ours | activation)


def write_scores(directory: Path) -> None:
    """Let the vocabulary head of a directory compute the score that is stored beside LogitScore's settings.

    With two tokens, the row of the first becomes that of the second plus the score, so that their difference is the
    score; with one token it becomes the score.
    """
    path = directory / LOGIT_SCORE_MODULE_FOLDER / WEIGHTS
    score = load_file(path)[SCORE_KEY][0]
    tokens = read_json(directory / LOGIT_SCORE_MODULE_FOLDER / "config.json")
    first, second = tokens["true_token_id"], tokens["false_token_id"]
    location = stored_tensors(directory)[VOCABULARY_HEAD]
    with safe_open(location.path, framework="pt") as file:
        specs = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        layout = file_layout(
            {n: TensorSpec(DTYPES_BY_NAME[part.get_dtype()], tuple(part.get_shape())) for n, part in specs.items()}
        )
        # Added to the row as it is stored, so that one rounding is left.
        row = score if second is None else score + specs[VOCABULARY_HEAD][second : second + 1][0].float()
    with RowWriter(location.path, layout, writes_header=False) as writer:
        writer.write(VOCABULARY_HEAD, row.to(layout.specs[VOCABULARY_HEAD].dtype)[None], first)
    path.unlink()


def pair_messages(pair: Pair) -> list[dict[str, Any]]:
    """A pair as sentence-transformers and processors take it, with opened pictures."""
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
                for part in open_parts(item) or [""]
            ],
        }
        for role, item in zip(("query", "document"), pair[:2], strict=True)
    ]


@contextlib.contextmanager
def probe_pairs_with_pictures(layout: VisionPairLayout, limit: int) -> Iterator[list[Pair]]:
    """Pairs of texts, pictures and both, of at most `limit` tokens each, without prompts."""
    room = (limit - layout.pair_format.num_special) // 2
    with probe_items(layout, room) as drawn:
        items = [*drawn, "What is this?"]
        yield [Pair(query, document) for query, document in zip(items, (*items[1:], items[0]), strict=True)]


def scores_of_class(model: nn.Module, processor: Any, pairs: Sequence[Pair], tokens: Sequence[int]) -> Tensor:
    """Scores of pairs, [1, N], by transformers' class and its processor: one at a time, and nothing is cut."""
    scores = []
    for pair in pairs:
        messages = pair_messages(pair)
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        bos = processor.tokenizer.bos_token
        inputs = processor(
            text=[text],
            images=[images] if images else None,
            return_tensors="pt",
            truncation=False,
            add_special_tokens=not (bos and text.startswith(bos)),
        )
        inputs = {name: values for name, values in inputs.items() if name != "labels"}
        logits = model(**inputs, logits_to_keep=1).logits[0, -1]
        scores.append(logits[tokens[0]] - sum(logits[token] for token in tokens[1:]))
    return torch.stack(scores).float()[None]
