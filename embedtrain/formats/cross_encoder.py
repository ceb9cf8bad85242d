"""The directory of a cross-encoder, as sentence-transformers and transformers read it, and its verification."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from embedtrain.data.pairs import Pair, PairFormat, PairTokenizer, PairTruncation
from embedtrain.data.text_format import Prompt
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ModelError
from embedtrain.formats.sentence_transformers import BATCH_SIZE, load_model, opening
from embedtrain.models.chat_template import write_chat_template
from embedtrain.models.cross_encoder import classifier_name
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

TRANSFORMER_MODULE = "sentence_transformers.base.modules.transformer.Transformer"
_TASK = "sequence-classification"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"


def probe_pairs(texts: tuple[str, ...], prompts: Mapping[str, str] | None = None) -> list[Pair]:
    """Each text as the query of the next one, with the prompts of both."""
    query, document = ((prompts or {}).get(role, "") for role in ("query", "document"))
    return [Pair(query + first, document + second) for first, second in zip(texts, (*texts[1:], texts[0]), strict=True)]


def probe_scores(
    encoder: Encoder, tokenizer: TextTokenizer, texts: tuple[str, ...], prompts: Mapping[str, str], device: torch.device
) -> Tensor:
    """Scores of `probe_pairs`, [1, N], one pair per forward pass. A collective if the encoder is sharded."""
    ids = tokenizer.ids(probe_pairs(texts, prompts))  # type: ignore[arg-type]
    with torch.no_grad():
        chunks = [tokenizer.chunk(ids, [row]).to(device) for row in range(len(ids))]
        return torch.cat([encoder(chunk) for chunk in chunks]).T.cpu()


def compared_pairs(tokenizer: TextTokenizer, texts: tuple[str, ...], prompts: Mapping[str, str]) -> Tensor | None:
    """Which of `probe_pairs` other libraries read as we do, bool [N]: None for all.

    They cut pairs as the tokenizer does, the longer text first, and with a template only the document is cut.
    """
    if not isinstance(tokenizer, PairTokenizer) or tokenizer.pair_format.truncation is PairTruncation.longest_first:
        return None
    return torch.from_numpy(tokenizer.are_whole(probe_pairs(texts, prompts)))


def formatted_pairs(source: ModelSource, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """`probe_pairs` as texts for the tokenizer, which adds what precedes and follows both."""
    template = None if source.kind.name != "cross_encoder" else source.settings.template
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


def stored_name(config: PretrainedConfig) -> Callable[[str], str]:
    """The name in the exported files of a weight of the encoder."""
    prefix = classifier_class(config).base_model_prefix  # type: ignore[attr-defined]
    return lambda name: classifier_name(name, prefix)


def write_cross_encoder_settings(
    directory: Path, source: ModelSource, config: dict[str, Any], tokenizer: PairTokenizer, *, has_chat: bool
) -> None:
    """Write the files that sentence-transformers reads; `config` is the content of config.json.

    text-embeddings-inference does not start if the settings of the transformer lack a maximum length.

    Decoders find the last token of a padded pair by the id in config.json, which is the tokenizer's. With `has_chat`,
    pairs are rendered by the chat template, whose prompts are instructions.

    Versions from 5.4 on read the activation from config_sentence_transformers.json, older ones from config.json: with
    one of them alone, a model whose scores are used as they are would get a sigmoid elsewhere.
    """
    assert source.kind.name == "cross_encoder"
    activation = {"activation_fn": source.settings.activation}
    prompts = {} if has_chat else {role: text for role, text in source.prompts.items() if text}
    name = classifier_class(source.config).__name__
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


def write_modules(directory: Path, kinds: Mapping[str, str]) -> None:
    """Write modules.json, from the folders of the modules and their types."""
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(directory / "modules.json", entries)


def renders_pairs(directory: Path) -> bool:
    """Whether sentence-transformers renders pairs with the chat template of an exported directory."""
    path = directory / TRANSFORMER_SETTINGS
    return path.is_file() and "message" in read_json(path).get("modality_config", {})


def with_pair_format(tokenizer: PairTokenizer, source: ModelSource) -> tuple[PreTrainedTokenizerBase, bool]:
    """A copy of the tokenizer whose own pairs begin and end as the template says, and whether it has its chat template.

    Other libraries then need no `pair_template`: sentence-transformers renders pairs with the chat template, which has
    the prompts as well. Raises a ModelError if the template cannot be written into the tokenizer.
    """
    assert source.kind.name == "cross_encoder"
    assert source.settings.template is not None
    template, pair_format = source.settings.template, tokenizer.pair_format
    copied = copy.deepcopy(tokenizer.tokenizer)
    special: tuple[Sequence[str], Sequence[str]] = ([], [])
    if template.special_tokens:
        own = PairFormat.of(copied)
        special = copied.convert_ids_to_tokens(list(own.before)), copied.convert_ids_to_tokens(list(own.after))
    elif template.bos and copied.bos_token_id is not None and pair_format.before[:1] == (copied.bos_token_id,):
        special = [str(copied.bos_token)], []
    chat = write_chat_template(template, source.prompts, copied, special)
    if chat is None and template.wraps_texts:
        raise ModelError(
            "model.pair_template cannot be exported: as one text its parts have other tokens, such as those of a word "
            "at the end of one part and one at the beginning of the next; separate them by line breaks, or write "
            "the text into prefix and suffix"
        )
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


def open_checked(auto_class: Any, directory: Path, source: ModelSource) -> Any:
    """The float32 model that a class of transformers loads; CheckpointError if a weight is missing or unexpected."""
    try:
        model, report = auto_class.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # a model's own code may raise anything
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in report[kind]:
            raise CheckpointError(f"transformers opens {directory}, and reports {kind.replace('_', ' ')}: {name}")
    return model


def whole_classifier(source: ModelSource, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Transformers' class of sequence classification, with the weights of a CrossEncoder."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
        source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code
    )
    model.load_state_dict({classifier_name(n, model.base_model_prefix): weight for n, weight in weights.items()})
    return model.eval()


def scores_of_transformers(directory: Path, source: ModelSource, tokenizer: Any, texts: tuple[str, ...]) -> Tensor:
    """Scores of `probe_pairs` by transformers alone, [1, N]."""
    model = open_checked(AutoModelForSequenceClassification, directory, source)
    return classifier_scores(model, source, tokenizer, texts)


def classifier_scores(model: nn.Module, source: ModelSource, tokenizer: Any, texts: tuple[str, ...]) -> Tensor:
    """Scores of `probe_pairs` by a model of transformers, [1, N], one pair per forward pass."""
    model.eval()
    with torch.no_grad():
        scores = [
            model(**tokenizer(*pair, truncation=True, return_tensors="pt")).logits
            for pair in formatted_pairs(source, texts)
        ]
        return torch.cat(scores).T


def scores_of_sentence_transformers(
    directory: Path, source: ModelSource, max_length: int, texts: tuple[str, ...]
) -> Tensor:
    """Scores of `probe_pairs` by sentence-transformers, [1, N], before their activation.

    Raises CheckpointError if it cannot open the directory, or with another activation or maximal length.
    """
    assert source.kind.name == "cross_encoder"
    has_chat = renders_pairs(directory)
    with opening(directory):
        model = load_model("CrossEncoder", directory, source)
        activation = f"{type(model.activation_fn).__module__}.{type(model.activation_fn).__name__}"
        # A chat template has the prompts as well.
        pairs = [pair[:2] for pair in probe_pairs(texts)] if has_chat else formatted_pairs(source, texts)
        scores = model.predict(
            pairs,
            batch_size=BATCH_SIZE,
            activation_fn=torch.nn.Identity(),
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        length = model.max_seq_length
    expected = source.settings.activation
    if activation != expected:
        raise CheckpointError(
            f"sentence-transformers opens {directory} with the activation {activation}, not {expected}"
        )
    if length != max_length:
        raise CheckpointError(f"sentence-transformers opens {directory} for pairs of {length} tokens, not {max_length}")
    return torch.as_tensor(scores).float().cpu().reshape(1, -1)
