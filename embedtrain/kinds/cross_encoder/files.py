"""Model directories of cross-encoders: a classifier of transformers that sentence-transformers reads as CrossEncoder.

With the format `logit_score` a reranker that started from tokens is also a causal language model, see `LogitScore`.
"""

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from embedtrain.checkpoint.tensor_files import DTYPES_BY_NAME, RowWriter, TensorSpec, file_layout
from embedtrain.config.recipe import LOGIT_SCORE
from embedtrain.data.rows import Prompt
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, Pair
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.chat_template import write_chat_template
from embedtrain.formats.model_files import (
    LOGITS,
    ModelFiles,
    ProbeRows,
    ServingOutputs,
    StoredName,
    python_block,
    shown_prompt,
)
from embedtrain.formats.sentence_transformers import (
    BATCH_SIZE,
    IDENTITY,
    SIGMOID,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    WEIGHTS,
    load_model,
    opening,
    write_modules,
)
from embedtrain.formats.transformers import (
    open_checked,
    open_tokenizer,
    read_tokenizer,
    resolve_max_length,
    write_tokenizer,
)
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.cross_encoder.model import (
    SCORE,
    VOCABULARY_HEAD,
    PairFormat,
    PairLayout,
    PairTruncation,
    vocabulary_head,
    vocabulary_rows,
)
from embedtrain.kinds.cross_encoder.vision import (
    LOGIT_SCORE_MODULE,
    LOGIT_SCORE_MODULE_FOLDER,
    SCORE_KEY,
    VisionPairLayout,
    answer_class,
    pair_messages,
    probe_pairs_with_pictures,
    scores_of_class,
    write_scores,
    write_settings,
)
from embedtrain.kinds.dense.vision import missing_packages, open_processor
from embedtrain.losses.encoded import Part
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json
from embedtrain.models.own_class import own_name
from embedtrain.models.stored_weights import TensorLocation, stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.models.vision_language import FAMILIES
from embedtrain.utils.files import write_json

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {SIGMOID: torch.sigmoid, IDENTITY: torch.clone}
_TASK = "sequence-classification"
LOGIT_SCORE_FOLDER = "logit_score"
_SCORE = "score.weight"
_NO_CHAT = (
    "model.pair_template cannot be exported: as one text its parts have other tokens, such as those of a word at the "
    "end of one part and one at the beginning of the next; separate them by line breaks, or write the text into prefix "
    "and suffix"
)
_WEIGHTS = "model{suffix}.safetensors"
_OF_CLASSIFIERS = ("id2label", "label2id", "num_labels", "problem_type", "sentence_transformers")


class CrossEncoderFiles(ModelFiles):
    """The classifier, its activation, and a chat template of pairs."""

    plural = "rerankers"
    description = (
        "A reranker: a cross-encoder that scores pairs of a query and a document of up to {max_length} tokens together"
    )
    tags = ("cross-encoder", "reranker")
    task = "text-ranking"
    graph = "from the tokens of pairs to `logits`, the scores before the activation"
    agreement = "1 - largest difference of a probability"
    has_pooler = False

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """The tokenizer has the template of pairs, if there is one."""
        if source.settings.vision is not None:
            write_settings(directory, source, tokenizer, vision_template(tokenizer, source))
            return
        own, has_chat = tokenizer.tokenizer, False
        if source.settings.template is not None:
            own, has_chat = with_pair_format(tokenizer, source)
        write_tokenizer(directory, own, tokenizer.max_length)
        _write_settings(directory, source, tokenizer, has_chat=has_chat)

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """The prompts are part of the texts, or of the chat template."""
        if _is_vision(architecture):
            return [
                *python_block(
                    "from PIL import Image",
                    "from sentence_transformers import CrossEncoder",
                    "",
                    f'model = CrossEncoder("{name}")',
                    'page = {"image": Image.open("page.png"), "text": "with a picture before it"}',
                    'scores = model.predict([("a question", "a text"), ("a question", page)])',
                ),
                "A query and a document are texts, pictures, or both. sentence-transformers formats pairs with "
                "`chat_template.jinja`; its argument `prompt` is an instruction for the query.",
                "",
            ]
        texts = [f"{kind} with {shown_prompt(text)}" for kind, text in prompts.items() if text]
        rest = "the library does not prepend it."
        note = f"Begin every {', and every '.join(texts)}: {rest}" if texts else ""
        if renders_pairs(architecture):
            note = (
                "sentence-transformers 6 formats pairs with `chat_template.jinja`; its argument `prompt` is an "
                "instruction for the query. The scores of other software, and of older versions, are only right for "
                "texts that are formatted as the template does."
            )
        return [
            *python_block(
                "from sentence_transformers import CrossEncoder",
                "",
                f'model = CrossEncoder("{name}")',
                'scores = model.predict([("a question", "a text that answers it"), ("a question", "another text")])',
                'ranking = model.rank("a question", ["a text that answers it", "another text"])',
            ),
            *([note, ""] if note else []),
        ]

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """Those of the classifier's class."""
        config = AutoConfig.from_pretrained(architecture, local_files_only=True)
        if _is_vision(architecture):
            file = f"{LOGIT_SCORE_MODULE_FOLDER}/{WEIGHTS}"  # until `finish_weights`
            own = {SCORE: StoredName(SCORE_KEY, file, is_float32=True), VOCABULARY_HEAD: StoredName(VOCABULARY_HEAD)}
            prefix = answer_class(config).base_model_prefix
            return {name: own[name] if name in own else StoredName(own_name(name, prefix)) for name in names}
        prefix = classifier_class(config).base_model_prefix  # type: ignore[attr-defined]
        return {name: StoredName(own_name(name, prefix)) for name in names}

    def further_specs(self, architecture: Path) -> dict[str, TensorSpec]:
        """The vocabulary head of a vision-language model."""
        if not _is_vision(architecture):
            return {}
        config = AutoConfig.from_pretrained(architecture, local_files_only=True).get_text_config()
        return {VOCABULARY_HEAD: TensorSpec(torch.float32, (config.vocab_size, config.hidden_size))}

    def further_rows(self, base: ModelSource) -> Iterator[tuple[str, int, Tensor]]:
        """That of the model that was trained."""
        if base.settings.vision is not None:
            yield from ((VOCABULARY_HEAD, first, rows) for first, rows in vocabulary_rows(base))

    def finish_weights(self, directory: Path) -> None:
        """The score becomes a row of the vocabulary head of a vision-language model."""
        if _is_vision(directory):
            write_scores(directory)

    def stored_shapes(self, source: ModelSource) -> dict[Path, dict[str, list[int]]]:
        """Those of the classifier, or of the class that predicts tokens behind pictures."""
        assert source.directory is not None
        model_class = AutoModelForSequenceClassification
        if source.settings.vision is not None:
            model_class = AutoModelForImageTextToText
        with init_empty_weights(include_buffers=False):
            model = model_class.from_config(source.config, trust_remote_code=source.trust_remote_code)
        return {source.directory: {name: list(tensor.shape) for name, tensor in model.state_dict().items()}}

    def probe(
        self, encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str], device: torch.device
    ) -> Tensor:
        """Scores of pairs as one vector [1, N]: a score near 0 has no relative difference."""
        with _probes(tokenizer, prompts) as pairs, torch.no_grad():
            tokens = tokenizer.tokens(pairs)
            chunks = [tokenizer.chunk(tokens, [row]).to(device) for row in range(len(tokens))]
            return torch.cat([encoder(chunk)[0] for chunk in chunks]).T.cpu()

    def compared(self, tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> Tensor | None:
        """The pairs that other libraries read as we do.

        They cut pairs as the tokenizer does, the longer text first, and with a template only the document is cut.
        """
        layout = _pair_layout(tokenizer)
        if layout.pair_format.truncation is PairTruncation.longest_first:
            return None
        with _probes(tokenizer, prompts) as pairs:
            return torch.from_numpy(layout.are_whole(pairs, tokenizer.max_length))

    def probe_opened(self, encoder: Encoder, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Scores [1, N] of the classifier."""
        return _scores(encoder, source, tokenizer)

    def of_transformers(self, directory: Path, source: ModelSource) -> Tensor:
        """Scores of the classifier alone, or of the class that predicts tokens behind pictures."""
        if source.settings.vision is not None:
            model = open_checked(AutoModelForImageTextToText, directory, source).eval()
            processor = open_processor(directory, source)
            with _probes(_bound(source, processor.tokenizer), {}) as pairs, torch.no_grad():
                return scores_of_class(model, processor, pairs, source.settings.tokens)
        tokenizer = open_tokenizer(directory, source)
        return _scores(open_checked(AutoModelForSequenceClassification, directory, source), source, tokenizer)

    def of_sentence_transformers(
        self,
        directory: Path,
        source: ModelSource,
        prompts: Mapping[str, str],
        max_length: int,
    ) -> Tensor:
        """Scores before their activation, [1, N]; activation and length are compared."""
        has_chat = renders_pairs(directory)
        with opening(directory):
            model = load_model("CrossEncoder", directory, source)
            activation = f"{type(model.activation_fn).__module__}.{type(model.activation_fn).__name__}"
            options = {"batch_size": BATCH_SIZE, "activation_fn": torch.nn.Identity()}
            options |= {"convert_to_tensor": True, "show_progress_bar": False}
            if source.settings.vision is not None:
                with _probes(_bound(source, model.tokenizer), {}) as probes:
                    scores = model.predict([pair_messages(pair) for pair in probes], **options)
            else:
                # A chat template has the prompts as well.
                pairs = [pair[:2] for pair in probe_pairs(PROBES)] if has_chat else formatted_pairs(source, PROBES)
                scores = model.predict(pairs, **options)
            length = model.max_seq_length
        if activation != source.settings.activation:
            raise CheckpointError(
                f"sentence-transformers opens {directory} with the activation {activation}, not "
                f"{source.settings.activation}"
            )
        if length != max_length:
            raise CheckpointError(
                f"sentence-transformers opens {directory} for pairs of {length} tokens, not {max_length}"
            )
        return torch.as_tensor(scores).float().cpu().reshape(1, -1)

    def of_peft(
        self,
        base: ModelSource,
        weights: Mapping[str, Tensor],
        attach: Callable[[nn.Module], nn.Module],
        source: ModelSource,
    ) -> Tensor:
        """Scores of the classifier with adapters."""
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            base.config, dtype=torch.float32, trust_remote_code=base.trust_remote_code
        )
        prefix = model.base_model_prefix
        model.load_state_dict({own_name(name, prefix): weight for name, weight in weights.items()})
        adapted = attach(model.eval())
        assert source.directory is not None
        return _scores(adapted, source, open_tokenizer(source.directory, source))

    def require_logit_score(self, base: ModelSource, architecture: Path) -> None:
        """A ConfigError unless it started from tokens, and its pairs have a chat template."""
        if base.settings.vision is not None:
            raise ConfigError(
                f"export.formats: {LOGIT_SCORE}: the export of a vision-language model is one already; leave it out"
            )
        if not base.settings.tokens:
            super().require_logit_score(base, architecture)
        if not renders_pairs(architecture):
            raise ConfigError(
                f"export.formats: {LOGIT_SCORE} needs a chat template, and as one text the parts of the template have "
                "other tokens; leave it out"
            )

    def write_logit_score(self, directory: Path, base: ModelSource, max_file_size: str) -> Path:
        """`LogitScore` of sentence-transformers 6."""
        return _write_logit_score(directory, base, max_file_size)

    def serving_facts(self, source: ModelSource, *, has_graph: bool) -> dict[str, Any]:
        """Whether the score is the logit of tokens where engines expect that of a class, and which tokens these are."""
        if source.settings.vision is None or source.directory is None:
            return {"logit_scores": bool(source.settings.tokens)}
        tokenizer = read_tokenizer(source.directory, trust_remote_code=source.trust_remote_code)
        answers = tokenizer.convert_ids_to_tokens(list(source.settings.tokens))
        return {"answers": json.dumps(answers[::-1]), "is_difference": json.dumps(len(answers) > 1)}

    def missing_packages(self, source: ModelSource) -> list[str]:
        """Those that transformers needs for the processor of a vision-language model."""
        return missing_packages(source) if source.settings.vision is not None else []

    def is_sentence_transformers(self, source: ModelSource) -> bool:
        """It opens no processor of which transformers needs missing packages."""
        return not self.missing_packages(source)

    def require_check(self, source: ModelSource) -> None:
        """The processor of SmolVLM needs a package for the durations of videos."""
        if "num2words" in self.missing_packages(source):
            raise ConfigError(
                f"transformers cannot open an export of {source.config.model_type} without num2words: install it, or "
                "write export.check=false"
            )

    def no_graph(self, source: ModelSource) -> str:
        """Only texts have one."""
        if source.settings.vision is None:
            return super().no_graph(source)
        return (
            f"a vision-language model ({source.config.model_type}) has no ONNX graph; sentence-transformers and "
            "transformers open its export"
        )

    def serving_outputs(self, part: Part, source: ModelSource, way: str) -> ServingOutputs:
        """Scores of pairs, also as the activation of sentence-transformers makes them if it is a known one."""
        logits = part.values[:, 0].cpu()
        scores = {"logits": list(logits.numpy())}
        if (activation := _ACTIVATIONS.get(source.settings.activation)) is not None:
            scores["activated"] = list(activation(logits).numpy())
        return {"scores": scores}

    def graph_outputs(self, source: ModelSource) -> dict[str, str | None]:
        """The logit of a pair of texts."""
        return {LOGITS: None} if source.settings.vision is None else {}

    def open_traced(self, directory: Path, source: ModelSource) -> tuple[Encoder | None, nn.Module]:
        """The classifier."""
        return None, open_checked(AutoModelForSequenceClassification, directory, source).eval()

    def traced(self, source: ModelSource, encoder: Encoder | None, output: Any, mask: Tensor) -> tuple[Tensor, ...]:
        """The logit of a pair."""
        return (output.logits,)

    def graph_shapes(self, source: ModelSource, texts: int, length: int) -> dict[str, tuple[int, ...]]:
        """Logits."""
        return {LOGITS: (texts, 1)} if source.settings.vision is None else {}

    def from_graph(
        self,
        source: ModelSource,
        rest: nn.Module | None,
        outputs: Sequence[Tensor],
        chunk: Chunk,
    ) -> Tensor:
        """Scores [N, 1]."""
        return outputs[0]

    def probe_texts(self, source: ModelSource) -> list[tuple[str, ...]]:
        """Pairs of texts."""
        return list(formatted_pairs(source, PROBES))

    def joined(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """Scores as one row."""
        return torch.cat(list(rows), dim=1)

    def measure_agreement(self, outputs: ProbeRows, expected: ProbeRows, source: ModelSource) -> float:
        """By the probabilities of pairs."""
        scores, references = (torch.cat(rows[LOGITS]).float().sigmoid() for rows in (outputs, expected))
        return 1 - float((scores - references).abs().max())


def _is_vision(directory: Path) -> bool:
    """Whether the configuration in a directory is that of a vision-language model."""
    return read_json(directory / "config.json").get("model_type") in FAMILIES


def _bound(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """The tokenizer that a library has opened, with our layout."""
    return TextTokenizer(tokenizer, resolve_max_length(source, tokenizer), source.kind.layout(source, tokenizer))


@contextlib.contextmanager
def _probes(tokenizer: TextTokenizer, prompts: Mapping[str, str]) -> Iterator[list[Pair]]:
    """`probe_pairs` of PROBES, and of a vision-language model pairs with pictures, with the prompts of both."""
    pairs, layout = probe_pairs(PROBES, prompts), _pair_layout(tokenizer)
    if not isinstance(layout, VisionPairLayout):
        yield pairs
        return
    query, document = (prompts.get(role, "") for role in ("query", "document"))
    with probe_pairs_with_pictures(layout, tokenizer.max_length) as more:
        yield pairs + [Pair(query + pair.query, document + pair.document) for pair in more]


def probe_pairs(texts: tuple[str, ...], prompts: Mapping[str, str] | None = None) -> list[Pair]:
    """Each text as the query of the next one, with the prompts of both."""
    query, document = ((prompts or {}).get(role, "") for role in ("query", "document"))
    return [Pair(query + first, document + second) for first, second in zip(texts, (*texts[1:], texts[0]), strict=True)]


def formatted_pairs(source: ModelSource, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """`probe_pairs` as texts for the tokenizer, which adds what precedes and follows both."""
    template = source.settings.template
    query, document = (
        (Prompt(), Prompt()) if template is None else (Prompt(*template.query), Prompt(*template.document))
    )
    return [(query(pair.query), document(pair.document)) for pair in probe_pairs(texts, source.prompts)]


def classifier_class(config: PretrainedConfig) -> type:
    """Transformers' class of sequence classification for a configuration; ModelError if there is none."""
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelError(
            f"{config.model_type} has no class for sequence classification in transformers, in which a cross-encoder "
            "is exported"
        )
    return kind  # type: ignore[no-any-return]


def _write_settings(directory: Path, source: ModelSource, tokenizer: TextTokenizer, *, has_chat: bool) -> None:
    """Write the files that sentence-transformers reads.

    text-embeddings-inference does not start if the settings of the transformer lack a maximum length.

    Decoders find the last token of a padded pair by the id in config.json, which is the tokenizer's. With `has_chat`,
    pairs are rendered by the chat template, whose prompts are instructions.

    Versions from 5.4 on read the activation from config_sentence_transformers.json, older ones from config.json: with
    one of them alone, a model whose scores are used as they are would get a sigmoid elsewhere.
    """
    activation = {"activation_fn": source.settings.activation}
    prompts = {} if has_chat else {role: text for role, text in source.prompts.items() if text}
    name = classifier_class(source.config).__name__
    config: dict[str, Any] = read_json(directory / "config.json")
    if config.get("pad_token_id") is None:
        config = config | {"pad_token_id": tokenizer.tokenizer.pad_token_id}
    write_json(directory / "config.json", config | {"architectures": [name], "sentence_transformers": activation})
    write_modules(directory, {"": TRANSFORMER_MODULE})
    output = {"method": "forward", "method_output_name": "logits"}
    chat = {"message": output | {"format": "flat"}} if has_chat else {}
    settings = {"transformer_task": _TASK, "modality_config": {"text": output} | chat, "module_output_name": "scores"}
    write_json(directory / TRANSFORMER_SETTINGS, settings | {"max_seq_length": tokenizer.max_length})
    write_json(
        directory / "config_sentence_transformers.json",
        {"__version__": {}, "model_type": "CrossEncoder", "default_prompt_name": None, "prompts": prompts} | activation,
    )


def renders_pairs(directory: Path) -> bool:
    """Whether sentence-transformers renders pairs with the chat template of an exported directory."""
    path = directory / TRANSFORMER_SETTINGS
    return path.is_file() and "message" in read_json(path).get("modality_config", {})


def _pair_layout(tokenizer: TextTokenizer) -> PairLayout:
    assert isinstance(tokenizer.layout, PairLayout)
    return tokenizer.layout


def vision_template(tokenizer: TextTokenizer, source: ModelSource) -> str:
    """A chat template that writes pairs with their pictures as the model reads them; ModelError if there is none."""
    template, own, pair_format = source.settings.template, tokenizer.tokenizer, _pair_layout(tokenizer).pair_format
    has_bos = template.bos and own.bos_token_id is not None and pair_format.before[:1] == (own.bos_token_id,)
    special = [str(own.bos_token)] if has_bos else [], list[str]()
    chat = write_chat_template(template, source.prompts, own, special, source.settings.vision.template.picture)
    if chat is None:
        raise ModelError(_NO_CHAT)
    return chat


def with_pair_format(tokenizer: TextTokenizer, source: ModelSource) -> tuple[PreTrainedTokenizerBase, bool]:
    """A copy of the tokenizer whose own pairs begin and end as the template says, and whether it has its chat template.

    Other libraries then need no `pair_template`: sentence-transformers renders pairs with the chat template, which has
    the prompts as well. Raises a ModelError if the template cannot be written into the tokenizer.
    """
    assert source.settings.template is not None
    template, pair_format = source.settings.template, _pair_layout(tokenizer).pair_format
    copied = copy.deepcopy(tokenizer.tokenizer)
    special: tuple[Sequence[str], Sequence[str]] = ([], [])
    if template.special_tokens:
        own = PairFormat.of(copied)
        special = copied.convert_ids_to_tokens(list(own.before)), copied.convert_ids_to_tokens(list(own.after))
    elif template.bos and copied.bos_token_id is not None and pair_format.before[:1] == (copied.bos_token_id,):
        special = [str(copied.bos_token)], []
    chat = write_chat_template(template, source.prompts, copied, special)
    if chat is None and template.wraps_texts:
        raise ModelError(_NO_CHAT)
    _write_post_processor(copied, pair_format)
    if chat is not None:
        copied.chat_template = chat
    return copied, chat is not None


def _write_post_processor(tokenizer: PreTrainedTokenizerBase, pair_format: PairFormat) -> None:
    ids = {"before": pair_format.before, "between": pair_format.between, "after": pair_format.after}
    names = [[name] if ids[name] else [] for name in ids]
    tokens = [
        {"id": name, "ids": list(part), "tokens": tokenizer.convert_ids_to_tokens(part)}
        for name, part in ids.items()
        if part
    ]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*names[0], "$A", *names[2]],
        pair=[*names[0], "$A:0", *names[1], "$B:0", *names[2]],
        special_tokens=tokens,
    )
    written = PairFormat.of(tokenizer)
    if (written.before, written.between, written.after) != tuple(ids.values()):
        raise ModelError(f"model.pair_template cannot be exported with {type(tokenizer).__name__}; leave it out")


def _scores(model: nn.Module, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Scores of `probe_pairs` by a model of transformers, [1, N], one pair per forward pass."""
    model.eval()
    with torch.no_grad():
        scores = [
            model(**tokenizer(*pair, truncation=True, return_tensors="pt")).logits
            for pair in formatted_pairs(source, PROBES)
        ]
        return torch.cat(scores).T


def _write_logit_score(directory: Path, base: ModelSource, max_file_size: str) -> Path:
    """Write the folder into an exported directory, one tensor in memory at a time; returns its path.

    Its vocabulary head is that of `base`, with one row replaced: with two tokens, the row of the first is that of the
    second plus the trained `score.weight`, so that their difference is the score; with one token it is the trained
    weight. The head has rows of its own even where those of the model are its embeddings, which stay as trained.

    Raises ModelError if the base model's files have changed and have no vocabulary head.
    """
    folder = directory / LOGIT_SCORE_FOLDER
    folder.mkdir()
    stored = stored_tensors(directory)
    specs = {name: _spec(location) for name, location in stored.items() if name != _SCORE}
    head = _trained_head(base, stored)
    specs[VOCABULARY_HEAD] = TensorSpec.of(head)
    split = split_state_dict_into_shards_factory(
        specs,
        get_storage_size=lambda spec: spec.num_bytes,
        max_shard_size=max_file_size,
        filename_pattern=_WEIGHTS,
    )
    for file, names in split.filename_to_tensors.items():
        layout = file_layout({name: specs[name] for name in names})
        with RowWriter(folder / file, layout, writes_header=True) as writer:
            for name in names:
                writer.write(name, head if name == VOCABULARY_HEAD else _read(stored[name]))
    if split.is_sharded:
        weights = {name: file for file, names in split.filename_to_tensors.items() for name in names}
        index = {"metadata": split.metadata, "weight_map": dict(sorted(weights.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    _write_logit_score_settings(directory, folder, base)
    return folder


def _trained_head(base: ModelSource, stored: Mapping[str, TensorLocation]) -> Tensor:
    """The vocabulary head [V, H] with the trained score, in the type of the export."""
    score = _read(stored[_SCORE])
    head = vocabulary_head(base).to(score.dtype)
    first, *second = base.settings.tokens
    # Added to the row as it is stored, so that one rounding is left.
    row = score[0].float() + sum(head[token].float() for token in second)
    head[first] = row.to(score.dtype)
    return head


def _write_logit_score_settings(directory: Path, folder: Path, base: ModelSource) -> None:
    tokens = base.settings.tokens
    config: dict[str, Any] = read_json(directory / "config.json")
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(base.config)].__name__
    config = {key: value for key, value in config.items() if key not in _OF_CLASSIFIERS}
    write_json(folder / "config.json", config | {"architectures": [name], "tie_word_embeddings": False})
    assert base.directory is not None
    exported = read_tokenizer(directory, trust_remote_code=base.trust_remote_code)
    tokenizer = read_tokenizer(base.directory, trust_remote_code=base.trust_remote_code)
    tokenizer.chat_template = exported.chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = exported.pad_token
    write_tokenizer(folder, tokenizer, exported.model_max_length)
    write_modules(folder, {"": TRANSFORMER_MODULE, LOGIT_SCORE_MODULE_FOLDER: LOGIT_SCORE_MODULE})
    ids = {"true_token_id": tokens[0], "false_token_id": tokens[1] if len(tokens) > 1 else None}
    write_json(folder / LOGIT_SCORE_MODULE_FOLDER / "config.json", ids | {"module_input_name": "causal_logits"})
    output = {"method": "forward", "method_output_name": "logits"}
    modalities = {"text": output, "message": output | {"format": "flat"}}
    settings = {"transformer_task": "text-generation", "modality_config": modalities}
    write_json(folder / TRANSFORMER_SETTINGS, settings | {"module_output_name": "causal_logits"})
    shutil.copyfile(directory / "config_sentence_transformers.json", folder / "config_sentence_transformers.json")


def _spec(location: TensorLocation) -> TensorSpec:
    with safe_open(location.path, framework="pt") as file:
        part = file.get_slice(location.key)
        return TensorSpec(DTYPES_BY_NAME[part.get_dtype()], tuple(part.get_shape()))


def _read(location: TensorLocation) -> Tensor:
    with safe_open(location.path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(location.key)
    return tensor
