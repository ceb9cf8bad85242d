"""Adapts the sharded model to the evaluators of sentence-transformers.

Checked on sentence-transformers 6.2, whose evaluators pass texts by position and everything else by keyword.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol, Self, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.util import quantize_embeddings
from sentence_transformers.util.similarity import SimilarityFunction
from torch import Tensor
from torch.nn.functional import normalize

from embedtrain.data.images.files import PICTURES, header_of
from embedtrain.data.images.item import Picture, join_chunks, join_parts
from embedtrain.data.in_memory import png_bytes
from embedtrain.data.sources.values import shorten
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import PROCESS_USE
from embedtrain.errors import ConfigError
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import LEXICAL_WEIGHTS
from embedtrain.tracking.console import Console

_PARTS = {"image", "text"}


class _Encode(Protocol):
    """`encode` and its variants for type checkers: the types are those of a model with one vector per text."""

    @overload
    def __call__(
        self,
        inputs: str | Iterable[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        task: str | None = None,
        output_value: None = None,
        precision: Literal["float32"] | None = "float32",
        convert_to_numpy: Literal[True] | None = None,
        convert_to_tensor: Literal[False] = False,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        show_progress_bar: bool | None = None,
        batch_size: int = 32,
    ) -> NDArray[np.float32]: ...

    @overload
    def __call__(
        self,
        inputs: str | Iterable[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        output_value: None = None,
        convert_to_tensor: Literal[True],
        **options: Any,
    ) -> Tensor: ...

    @overload
    def __call__(
        self, inputs: Any, prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any: ...


class _EncodeMethod(Protocol):
    def __get__(self, instance: Any, owner: type | None = None) -> _Encode: ...


def _encodes(method: Callable[..., Any]) -> _EncodeMethod:
    """The method itself; type checkers know what it returns."""
    return cast(_EncodeMethod, method)


class SentenceTransformersAdapter:
    """A SentenceEncoder for evaluators that call `model.encode` and similar methods.

        EmbeddingSimilarityEvaluator(...)(SentenceTransformersAdapter(encoder))

    Every rank must run the evaluator with the same data; every rank gets all vectors and the same metrics. Pass
    `output_path` on rank 0 only, or all ranks write the same file. `encode` returns all vectors on every rank; for a
    corpus that does not fit, use `Evaluator`, which keeps them sharded.
    """

    def __init__(self, encoder: SentenceEncoder) -> None:
        self.encoder = encoder
        self.prompts = {"query": encoder.query_prompt, "document": encoder.document_prompt}
        self.model_card_data = _NoModelCard()
        self.similarity_fn_name = encoder.score.name

    @_encodes
    def encode(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        task: str | None = None,
        output_value: str | None = None,
        precision: str | None = "float32",
        convert_to_numpy: bool | None = None,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        **_ignored: Any,
    ) -> Any:
        """Vectors of one text, [D], or of several, [n, D]; a collective.

        A tensor on the encoder's device with `convert_to_tensor`, else a numpy array, else a list of tensors. With a
        late-interaction model, a list of the vectors of each text, [R, D], arrays only with `convert_to_numpy`; texts
        are documents unless `task` is `query`. With a model of three representations, the dense vectors; or, by
        `output_value`, those of tokens (`token_embeddings`), or the weight of each token id of each text
        (`lexical_weights`). Other options, such as `batch_size`, have no effect.
        """
        is_single = _is_single(inputs)
        texts = self._items([inputs] if is_single else list(inputs))
        role = TextRole.query if task == TextRole.query.value else TextRole.document
        label = f"encoding {'queries' if role is TextRole.query else 'texts'}"
        part = self.encoder.encode(texts, self._prompt(prompt, prompt_name), role=role, label=label)
        outputs = self.encoder.score.outputs(part)
        output_value = output_value or next(iter(outputs))
        if output_value not in outputs:
            raise ConfigError(f"output_value={output_value} is not supported: only {', '.join(outputs)} is")
        part = outputs[output_value]
        if output_value == LEXICAL_WEIGHTS:
            weights = [_lexical_weights(part.slice(i, i + 1)) for i in range(len(texts))]
            return weights[0] if is_single else weights
        convert_to_numpy = part.sizes is None if convert_to_numpy is None else convert_to_numpy
        vectors: Any = part.values[:, :truncate_dim]
        if normalize_embeddings:
            vectors = normalize(vectors, dim=1)
        if part.sizes is not None:
            if precision not in (None, "float32"):
                raise ConfigError(f"precision={precision} is not supported for vectors of tokens: only float32 is")
            if convert_to_numpy and not convert_to_tensor:
                vectors = vectors.cpu().numpy()
            of_texts = [vectors[end - size : end] for end, size in zip(part.sizes.cumsum(), part.sizes, strict=True)]
            return of_texts[0] if is_single else of_texts
        if precision not in (None, "float32"):
            quantised = quantize_embeddings(vectors.cpu(), precision=precision)
            vectors = torch.from_numpy(quantised) if convert_to_tensor or not convert_to_numpy else quantised
        elif convert_to_numpy and not convert_to_tensor:
            vectors = vectors.cpu().numpy()
        if is_single:
            return vectors[0]
        return vectors if convert_to_tensor or convert_to_numpy else list(vectors)

    @_encodes
    def encode_query(
        self, inputs: str | Sequence[str], prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any:
        """`encode` of queries, with their prompt as the default."""
        options = {"task": "query"} | options
        return self.encode(inputs, prompt_name or (None if prompt is not None else "query"), prompt, **options)

    @_encodes
    def encode_document(
        self, inputs: str | Sequence[str], prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any:
        """`encode` of documents, with their prompt as the default."""
        return self.encode(inputs, prompt_name or (None if prompt is not None else "document"), prompt, **options)

    def encode_chunks(
        self,
        documents: Sequence[Sequence[str]],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        overlap: int = 0,
    ) -> list[NDArray[np.float32]]:
        """The vectors of the chunks of each document, [chunks, D], each from a forward pass of the whole document.

        A document that is longer than the model allows is read in windows of as many whole chunks as fit. Each begins
        with the last `overlap` chunks of the one before, whose vectors are those of that one. The prompt is that of
        documents by default, before the first chunk of a window. A collective.

        Raises ConfigError if the model has no late chunking, or a document no chunk.
        """
        prompt = self._prompt(prompt, prompt_name or (None if prompt is not None else "document"))
        tokenizer = self.encoder.tokenizer
        limit, items, new, firsts = tokenizer.limit(TextRole.document), list[str](), list[int](), list[int]()
        for number, chunks in enumerate(documents):
            if isinstance(chunks, str) or not chunks:
                raise ConfigError(
                    f"encode_chunks: document {number} of {len(documents):,} must be a list of its chunks, at least one"
                )
            done = 0
            firsts.append(len(items))
            for window in tokenizer.layout.chunk_windows(self._items(list(chunks)), limit, prompt, overlap=overlap):
                items.append(join_chunks([chunks[chunk] for chunk in window]))
                new.append(window.stop - done)
                done = window.stop
        part = self.encoder.encode(items, prompt, role=TextRole.document, label="encoding documents")
        assert part.sizes is not None
        values, ends = part.values.cpu().numpy(), np.cumsum(part.sizes)
        windows = [values[end - count : end] for end, count in zip(ends, new, strict=True)]
        return [np.concatenate(windows[start:end]) for start, end in pairwise([*firsts, len(windows)])]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Scores of all pairs, such as cosines of [n, D] and [m, D], to [n, m]."""
        similarity: Callable[..., Tensor] = SimilarityFunction.to_similarity_fn(self.similarity_fn_name)
        return similarity(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Scores row by row, such as cosines of two [n, D], to [n]."""
        similarity: Callable[..., Tensor] = SimilarityFunction.to_similarity_pairwise_fn(self.similarity_fn_name)
        return similarity(embeddings1, embeddings2)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.encoder.world.device

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a text."""
        return self.encoder.tokenizer.max_length

    def get_embedding_dimension(self) -> int:
        """D, from a forward pass. A collective."""
        return self.encoder.encode([]).values.shape[1]

    get_sentence_embedding_dimension = get_embedding_dimension

    def _items(self, values: list[Any]) -> list[str]:
        """Texts, and references to pictures; a ConfigError for what is neither, and would be encoded as "nan"."""
        reads_pictures = self.encoder.tokenizer.layout.reads_pictures
        items: list[str] = []
        for position, value in enumerate(values):
            parts = list(value.values()) if isinstance(value, Mapping) and value.keys() <= _PARTS else [value]
            if not isinstance(value, str) and reads_pictures and parts and all(map(_is_part, parts)):
                items.append(join_parts([part if isinstance(part, str) else _picture(part) for part in parts]))
            elif isinstance(value, str):
                items.append(value)
            else:
                what = "text, picture of Pillow, or mapping of image and text" if reads_pictures else "text"
                raise ConfigError(
                    f"encode: item {position} of {len(values):,} is {shorten(value)} ({type(value).__name__}), not a "
                    f"{what}; leave it out, or write what it says as a str"
                )
        return items

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        if prompt is not None:
            return prompt
        if name is not None and name not in self.prompts:
            raise ConfigError(f"prompt_name={name} is unknown: allowed are {', '.join(self.prompts)}")
        return "" if name is None else self.prompts[name]


class TextEncoder(SentenceTransformersAdapter):
    """Encodes texts with a model that may be sharded over the ranks; what `load_encoder` returns.

    Every rank calls each method with the same texts and gets all vectors: float32 arrays [n, D], or [D] for one text;
    with a late-interaction model, lists of tensors [R, D], or one for one text.
    A context manager: leaving it leaves the process group, as `close` does.

    Args:
        prompts: of the model, by name.
        close: called once, at the end.
        shows_progress: whether `encode` shows how far it is, on rank 0, where `show_progress_bar` does not say.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        prompts: Mapping[str, str],
        close: Callable[[], None],
        *,
        shows_progress: bool = False,
    ) -> None:
        super().__init__(encoder)
        self._shows_progress = shows_progress
        self.prompts = {**prompts, **self.prompts}
        self._finalizer = weakref.finalize(self, close)
        self._finalizer.atexit = False

    @_encodes
    def encode(self, *args: Any, show_progress_bar: bool | None = None, **options: Any) -> Any:
        """`SentenceTransformersAdapter.encode` in one thread at a time; a ConfigError after `close`.

        In a process with other ranks, threads are refused: ranks could encode in different orders, and hang.
        """
        shown = self._shows_progress if show_progress_bar is None else show_progress_bar
        console = Console(enabled=shown and self.encoder.world.is_main)
        with self._used(), console.progress() as progress, self.encoder.report_progress(progress):
            return super().encode(*args, **options)

    def get_embedding_dimension(self) -> int:
        """D, from a forward pass. A collective."""
        with self._used():
            return super().get_embedding_dimension()

    get_sentence_embedding_dimension = get_embedding_dimension

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with PROCESS_USE.of_call("encode", may_wait=self.encoder.world.size == 1):
            if not self._finalizer.alive:
                raise ConfigError("encode: this encoder is closed; load the model again with load_encoder")
            yield

    @_encodes
    def encode_queries(self, texts: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the model's prompt of queries."""
        return self.encode_query(texts, **options)

    @_encodes
    def encode_documents(self, texts: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the model's prompt of documents."""
        return self.encode_document(texts, **options)

    def close(self) -> None:
        """Leave the process group. The encoder cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Self:
        """The encoder itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _is_single(inputs: Any) -> bool:
    """Whether it is one item: a text, a picture, or a mapping."""
    return isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable)


def _picture(image: Any) -> Picture:
    """The reference to a picture of Pillow, whose bytes are kept on disk until this process ends."""
    data = png_bytes(image)
    header = header_of(data)
    PICTURES.add_bytes(header, data)
    return header.picture


def _is_part(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return isinstance(value, str) or (pillow is not None and isinstance(value, pillow.Image))


class _NoModelCard:
    """Ignores what evaluators write to the model card: the export writes its own."""

    def set_evaluation_metrics(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""


def _lexical_weights(part: Part) -> dict[int, float]:
    """The weights of one text, those above 0, by token id."""
    assert part.ids is not None
    weights = zip(part.ids.tolist(), part.values[:, 0].tolist(), strict=True)
    return {token: weight for token, weight in weights if weight > 0}
