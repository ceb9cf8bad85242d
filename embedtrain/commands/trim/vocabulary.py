"""Keeps the tokens that a corpus uses, and their rows of the embedding matrix.

Shapes: V tokens.
"""

import copy
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain import __version__
from embedtrain.config.recipe import ExportConfig, OnError
from embedtrain.data.cache.cache import Cache, cache_directory
from embedtrain.data.cache.row_store import ArrowRows, RowStore, read_sources
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.reader import DocumentReader
from embedtrain.data.sources.values import BadRow
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError, DataError
from embedtrain.formats.export import DerivedModel, ExportResult, num_parameters, open_model, write_derived
from embedtrain.formats.export_record import require_replaceable
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.mining.pool import corpus_parts
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console

if TYPE_CHECKING:
    from embedtrain.commands.trim import TrimOptions

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
KINDS = ("WordPiece", "WordLevel", "Unigram", "BPE")


def required_tokens(tokenizer: Mapping[str, Any]) -> set[int]:
    """The ids that are kept whatever a corpus has: special and added tokens, bytes, and the unknown token.

    `tokenizer` is the content of tokenizer.json.
    """
    model = tokenizer["model"]
    ids = {int(token["id"]) for token in tokenizer.get("added_tokens", ())}
    if model["type"] == "Unigram":
        entries = model["vocab"]
        ids |= {index for index, (token, _) in enumerate(entries) if token in _BYTE_TOKENS}
        ids |= {min(range(len(entries)), key=lambda index: entries[index][1])}
        ids |= {model["unk_id"]} - {None}
    else:
        vocabulary = model["vocab"]
        ids |= {vocabulary[token] for token in (*_BYTE_TOKENS, model.get("unk_token")) if token in vocabulary}
        if model["type"] == "BPE":  # the characters that stand for bytes, or the alphabet
            ids |= {index for token, index in vocabulary.items() if len(token) == 1}
    return ids


def with_parts(tokenizer: Mapping[str, Any], kept: set[int]) -> set[int]:
    """The ids to keep, and for BPE those of all tokens from which merges make them."""
    model = tokenizer["model"]
    if model["type"] != "BPE":
        return kept
    vocabulary, sources = model["vocab"], dict[str, list[tuple[str, str]]]()
    for first, second in merges_of(model):
        sources.setdefault(first + second, []).append((first, second))
    token_of = {index: token for token, index in vocabulary.items()}
    closed, waiting = set(kept), [token_of[index] for index in kept if index in token_of]
    while waiting:
        for part in {part for pair in sources.get(waiting.pop(), ()) for part in pair}:
            if vocabulary[part] not in closed:
                closed.add(vocabulary[part])
                waiting.append(part)
    return closed


def merges_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE model, which newer files store as pairs and older ones as one text."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def trim_tokenizer(tokenizer: Mapping[str, Any], new_id: Mapping[int, int]) -> dict[str, Any]:
    """The content of tokenizer.json with the tokens in `new_id`, whose numbers keep their order."""
    trimmed: dict[str, Any] = json.loads(json.dumps(tokenizer))
    model = trimmed["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for index, entry in enumerate(model["vocab"]) if index in new_id]
        if model["unk_id"] is not None:
            model["unk_id"] = new_id[model["unk_id"]]
    else:
        model["vocab"] = {token: new_id[index] for token, index in model["vocab"].items() if index in new_id}
    if model["type"] == "BPE":
        kept = model["vocab"]
        merges = zip(tokenizer["model"]["merges"], merges_of(tokenizer["model"]), strict=True)
        model["merges"] = [
            merge for merge, (first, second) in merges if first in kept and second in kept and first + second in kept
        ]
    for token in trimmed.get("added_tokens", ()):
        token["id"] = new_id[token["id"]]
    if trimmed.get("padding"):
        trimmed["padding"]["pad_id"] = new_id[trimmed["padding"]["pad_id"]]
    _renumber_processor(trimmed.get("post_processor"), new_id)
    return trimmed


def _renumber_processor(processor: Any, new_id: Mapping[int, int]) -> None:
    if not processor:
        return
    match processor["type"]:
        case "Sequence":
            for part in processor["processors"]:
                _renumber_processor(part, new_id)
        case "TemplateProcessing":
            for token in processor["special_tokens"].values():
                token["ids"] = [new_id[index] for index in token["ids"]]
        case "BertProcessing" | "RobertaProcessing":
            for name in ("sep", "cls"):
                token, index = processor[name]
                processor[name] = [token, new_id[index]]
        case "ByteLevel":
            pass
        case kind:
            raise ConfigError(f"the tokenizer has a post-processor {kind}, whose ids cannot be changed")


def trim_files(directory: Path, trim: Callable[[dict[str, Any]], dict[str, Any]], new_id: Mapping[int, int]) -> None:
    """Replace the files of a tokenizer that `save_pretrained` wrote; `trim` gets the content of tokenizer.json."""
    for path in directory.iterdir():
        if path.is_file() and path.name not in _FILES:
            path.unlink()  # vocabularies of slow tokenizers, which would be read instead
    path = directory / "tokenizer.json"
    trimmed = trim(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(trimmed, ensure_ascii=False), encoding="utf-8")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if added := config.get("added_tokens_decoder"):
        config["added_tokens_decoder"] = {str(new_id[int(index)]): token for index, token in added.items()}
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def renumber_config(config: Any, new_id: Mapping[int, int]) -> None:
    """Replace the numbers of tokens in a model's configuration."""
    for name, value in config.to_dict().items():
        if name.endswith("_token_id"):
            setattr(config, name, _renumbered(value, new_id))
    config.vocab_size = len(new_id)


def _renumbered(value: Any, new_id: Mapping[int, int]) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [new_id[index] for index in value if index in new_id]
    return new_id.get(value) if isinstance(value, int) else value


_BATCH_SIZE = 4096  # texts that are tokenized at a time
_NUM_COMPARED = 32  # texts whose outputs are compared with those of the model


def trim_model(options: "TrimOptions", output_dir: Path, console: Console) -> ExportResult:
    """Write the model with fewer tokens, which replaces `output_dir` once it has passed all checks.

    One copy of the model is in memory.

    Raises ConfigError for a model or tokenizer whose tokens cannot be left out, DataError for texts that cannot be
    read, and CheckpointError if a text of kept tokens has other tokens or outputs than before.
    """
    source = open_model(
        options.model, options.revision, options.kind, options.pooling, trust_remote_code=options.trust_remote_code
    )
    assert source.directory is not None
    output_dir = require_replaceable(output_dir, source.directory)
    if source.kind.reads_vocabulary(source):
        raise ConfigError(
            f"model={options.model}: its outputs are computed from rows of the vocabulary: they would be lost"
        )
    loaded = load_tokenizer(source)
    tokenizer_json = _tokenizer_json(loaded, options.model)
    names = embedding_names(source)
    counter = TokenCounter(loaded, _num_rows(source, names))
    counts = _count_tokens(counter, options, source, console)
    kept = kept_tokens(tokenizer_json, counts, counter.always, options, _min_id(source))
    new_id = {index: number for number, index in enumerate(kept)}
    covered = int(counts[kept].sum()) / max(1, int(counts.sum()))
    console.note(
        f"keeping {len(kept):,} of {len(counts):,} tokens, which are {covered:.2%} of the {int(counts.sum()):,} tokens "
        "of the texts"
    )
    config = copy.deepcopy(source.config)
    renumber_config(config, new_id)
    trimmed = replace(source, config=config)
    with console.phase("reading the model"):
        weights = full_state_dict(source, 0)
    rows = torch.tensor(kept)
    trimmed_weights = {name: value[rows] if name in names else value for name, value in weights.items()}
    console.note(f"{num_parameters(trimmed):,} of {num_parameters(source):,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_pretrained(folder)
        trim_files(Path(folder), lambda content: trim_tokenizer(content, new_id), new_id)
        tokenizer = bound_tokenizer(trimmed, load_tokenizer(trimmed, folder))
        examples = counter.examples(kept) if options.check else []
        if options.check and not examples:
            console.warn("no text that was counted has only tokens that are kept: the outputs of none were compared")
        with console.phase("comparing texts of kept tokens"):
            _compare(
                (source, bound_tokenizer(source, loaded), weights),
                (trimmed, tokenizer, trimmed_weights),
                examples,
                new_id,
            )
        what = f"{{}} with {len(kept):,} of its {len(counts):,} tokens, kept by embedtrain {__version__}."
        derived = DerivedModel(trimmed, trimmed_weights, tokenizer, options.model, what)
        settings = ExportConfig(dtype=options.dtype, check=options.check, truncate_dim=trimmed.vectors.truncate_dim)
        return write_derived(derived, output_dir, settings, console, trust_remote_code=options.trust_remote_code)


def _count_tokens(
    counter: "TokenCounter", options: "TrimOptions", source: ModelSource, console: Console
) -> NDArray[np.int64]:
    """How often each token occurs in the texts; those of the model's prompts are kept."""
    for text in source.prompts.values():
        counter.keep_text(text)
    with console.progress() as progress:
        for number, text in enumerate(_texts(options), start=1):
            counter.add(text)
            if number % _BATCH_SIZE == 0:
                progress("counting tokens of texts", number, number)
    return counter.finish()


def _tokenizer_json(tokenizer: PreTrainedTokenizerBase, model: str) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"model={model}: its tokenizer is written in Python, without a tokenizer.json")
    content: dict[str, Any] = json.loads(backend.to_str())
    if content["model"]["type"] not in KINDS:
        raise ConfigError(
            f"model={model}: its tokenizer is a {content['model']['type']}; allowed are {', '.join(KINDS)}"
        )
    return content


def embedding_names(source: ModelSource) -> set[str]:
    """The names of the embedding matrix of tokens among the encoder's weights."""
    encoder = build_encoder(source)
    weight = encoder.backbone.get_input_embeddings().weight
    return {name for name, value in encoder.named_parameters(remove_duplicate=False) if value is weight}


def _num_rows(source: ModelSource, names: set[str]) -> int:
    return int(build_encoder(source).state_dict()[next(iter(names))].shape[0])


def _min_id(source: ModelSource) -> int:
    """Ids up to this one are kept: RoBERTa's models count positions from the id of the padding token."""
    pad = getattr(source.config, "pad_token_id", None)
    return -1 if pad is None or pad > 1000 else int(pad)


def kept_tokens(
    tokenizer: dict[str, Any], counts: NDArray[np.int64], always: set[int], options: "TrimOptions", min_id: int
) -> list[int]:
    """The ids to keep, ascending: required ones, and the most frequent ones up to `top` in all."""
    required = with_parts(tokenizer, required_tokens(tokenizer) | always | set(range(min_id + 1)))
    required = {index for index in required if index < len(counts)}
    if options.top is not None and len(required) > options.top:
        raise ConfigError(
            f"top={options.top}: special tokens, bytes and the tokens of prompts are {len(required):,} alone"
        )
    order = np.lexsort((np.arange(len(counts)), -counts))
    kept = set(required)
    for index in order[counts[order] >= options.min_count].tolist():
        if index in kept:
            continue
        with_index = with_parts(tokenizer, {index}) if tokenizer["model"]["type"] == "BPE" else {index}
        if options.top is not None and len(kept | with_index) > options.top:
            break
        kept |= with_index
    return sorted(kept)


def _texts(options: "TrimOptions") -> Iterator[str]:
    """All texts of the rows, then of the corpora."""
    if options.data:
        cache = Cache(directory=cache_directory(options.cache_dir))
        for store in read_sources(options.data, OnError.stop, cache=cache):
            yield from _row_texts(store)
    for part in corpus_parts(options.corpus):
        reader = DocumentReader([part], part.name, ids_required=False)
        for line, document in reader.documents(PartPiece(part)):
            if isinstance(document, BadRow):
                raise DataError(f"{part.location(line)}: {document}")
            yield document.full_text


def _row_texts(store: RowStore) -> Iterator[str]:
    assert isinstance(store.rows, ArrowRows)
    for batch_index in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(batch_index)
        for name in ("query", "instruction"):
            if name in batch.schema.names:
                yield from filter(None, batch.column(name).to_pylist())
        for name in ("positives", "negatives"):
            yield from batch.column(name).flatten().to_pylist()


class TokenCounter:
    """How often each token occurs in texts, which are not cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
        self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._fast.no_truncation()
        self._fast.no_padding()
        self.counts = np.zeros(num_tokens, dtype=np.int64)
        self.always: set[int] = set()  # ids that are kept
        self._texts: list[str] = []
        self._examples: list[tuple[str, list[int]]] = []

    def keep_text(self, text: str) -> None:
        """Keep the tokens of a text that precedes others."""
        self.always |= set(self._fast.encode(text).ids) | set(self._fast.encode(f"{text}a").ids)

    def add(self, text: str) -> None:
        """Count the tokens of a text."""
        self._texts.append(text)
        if len(self._texts) == _BATCH_SIZE:
            self._count()

    def finish(self) -> NDArray[np.int64]:
        """The counts, [V]."""
        self._count()
        if not self.counts.any():
            raise DataError("data and corpus have no texts to count tokens of")
        return self.counts

    def examples(self, kept: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Some texts of which all tokens are kept, with their tokens."""
        known = set(kept)
        whole = (example for example in self._examples if known.issuperset(example[1]))
        return list(itertools.islice(whole, _NUM_COMPARED))

    def _count(self) -> None:
        encodings = self._fast.encode_batch(self._texts)
        ids = [encoding.ids for encoding in encodings]
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64)
        self.counts += np.bincount(flat, minlength=len(self.counts))[: len(self.counts)]
        self._examples += zip(self._texts[:1000], ids, strict=False)
        self._examples = self._examples[-8000:]
        self._texts = []


def _compare(
    model: tuple[ModelSource, TextTokenizer, dict[str, Tensor]],
    trimmed: tuple[ModelSource, TextTokenizer, dict[str, Tensor]],
    examples: Iterable[tuple[str, list[int]]],
    new_id: dict[int, int],
) -> None:
    """A CheckpointError unless texts of kept tokens have the same tokens and outputs."""
    texts = [text for text, _ in examples]
    if not texts:
        return
    outputs, ids = [], []
    for source, tokenizer, weights in (model, trimmed):
        encoder = assemble_encoder(source).eval()
        encoder.load_state_dict(dict(weights))
        tokens = tokenizer.tokens(texts)
        ids.append(tokens.lists())
        with torch.no_grad():
            chunks = [tokenizer.chunk(tokens, [row]) for row in range(len(tokens))]
            outputs.append([encoder(chunk)[0] for chunk in chunks])
    for text, before, after, *vectors in zip(texts, *ids, *outputs, strict=True):
        if [new_id.get(index, index) for index in before] != after or not torch.equal(*vectors):
            raise CheckpointError(
                f"the smaller vocabulary gives {text[:80]!r} other tokens or outputs than the model's"
            )
