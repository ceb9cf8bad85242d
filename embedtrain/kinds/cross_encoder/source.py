"""Opens cross-encoders: the head as the directory describes it, with which activation, trained or new."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from embedtrain.config.kind_settings import (
    PAIR_TEMPLATES,
    SCORE_TOKENS,
    PairTemplate,
    ScoreHead,
    pair_template,
    published_template,
)
from embedtrain.config.kinds import Kind
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import OptionChecks, model_option, written
from embedtrain.data.tokens import FastTokenizer
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.chat_template import ItemTemplate, read_chat_template, read_pair_picture
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.sentence_transformers import (
    CROSS_ENCODER,
    IDENTITY,
    LOGIT_SCORE,
    SETTINGS,
    SIGMOID,
    prompts_of,
    read_modules,
)
from embedtrain.formats.source import StoredModel, read_files, source_of
from embedtrain.formats.transformers import TOKENIZER_FILES, read_tokenizer
from embedtrain.kinds.cross_encoder.options import CrossEncoderOptions
from embedtrain.kinds.dense.options import require_no_image_options
from embedtrain.kinds.dense.vision import (
    VisionSettings,
    picture_text,
    picture_token,
    read_processing,
    stored_chat_template,
)
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.file_references import read_json
from embedtrain.models.types import ModelSource
from embedtrain.models.vision_language import FAMILIES

# A cross-encoder of sentence-transformers with a linear layer on a token vector.
SCORE_MODULES = ["Transformer", "Pooling", "Dense"]
LATE = "late"  # of EuroBERT's class: its head receives every token, and no pooled one
_CLASSIFIER = "ForSequenceClassification"
_CAUSAL = "ForCausalLM"
# Settings of decoders that change logits after the vocabulary head, with the values that do not.
_LOGIT_SETTINGS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """The head of a cross-encoder.

    Attributes:
        is_new: whether the model's files have no weights for it, so that they are random.
        activation: the class that turns scores into what sentence-transformers returns, by its full name. Training and
            evaluation use the scores before it.
        tokens: ids of the tokens whose rows of the vocabulary head it starts from: the first minus the second, if there
            is one; empty for a classification head.
        labels: those of a classifier of `num_labels` in the files that it starts from: the logit of the first minus
            that of the second, if there is one; empty for a classifier of one label.
        num_labels: of the classifier in the files.
        linear: the directory of a Dense module whose weight [1, H] is the class's own `score.weight`.
        template: what surrounds the texts of a pair; None: the tokenizer's own pairs.
        note: a line for the user about the directory that the head is added to; may be empty.
        vision: how a vision-language model reads pictures, whose head always starts from tokens; None: it reads texts.
    """

    is_new: bool
    activation: str = SIGMOID
    tokens: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    num_labels: int = 1
    linear: Path | None = None
    note: str = ""
    template: PairTemplate | None = None
    vision: VisionSettings | None = None


def new_score_head(config: PretrainedConfig, where: str) -> HeadSource:
    """A new head, for which `config` becomes that of a classifier of one label; a ModelError if there is no class."""
    own = dict(getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and f"AutoModel{_CLASSIFIER}" not in own:
        raise ModelError(f"{where}: {config.model_type} has no class for sequence classification, which scores pairs")
    config.num_labels = 1
    if getattr(config, "classifier_pooling", None) == LATE:
        config.classifier_pooling = "mean"
    return HeadSource(is_new=True)


def is_reranker(config: PretrainedConfig) -> bool:
    """Whether the model was saved as a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def score_pooling(config: PretrainedConfig) -> Pooling:
    """Which token vector the architecture's head receives: the first of encoders, the last of decoders.

    ModernBERT may take the mean. The scores are compared with those of the whole class after its weights are read.
    """
    if is_decoder(config):
        return Pooling.last
    return Pooling.mean if getattr(config, "classifier_pooling", None) == "mean" else Pooling.cls


def recognise(directory: Path) -> str | None:
    """Which reranker a directory holds, in words for a message; None for other models."""
    settings: dict[str, Any] = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    has_modules, path = (directory / "modules.json").is_file(), directory / "config.json"
    modules = [module.kind for module in read_modules(directory)] if has_modules else []
    names = read_json(path).get("architectures") if path.is_file() else None
    names = [str(name) for name in names] if isinstance(names, list) else []
    # A Transformer alone computes the class; with a Pooling or a head behind it, it is a backbone.
    is_classifier = set(modules) <= {"Transformer"} and any(
        name.endswith("ForSequenceClassification") for name in names
    )
    if settings.get("model_type") == CROSS_ENCODER or modules == ["Transformer", LOGIT_SCORE] or is_classifier:
        return f"a reranker ({', '.join(names if is_classifier else ['with', *modules])})".replace("with,", "with")
    return None


def read(kind: Kind, directory: Path, model: CrossEncoderOptions) -> ModelSource:
    """A directory of a cross-encoder, or of another model, on whose backbone the head is new."""
    files = read_files(directory, model)
    head = _read_head(files, files.config, model)
    is_stored = head.template is not None and model.pair_template is None
    is_embedding_model = files.modules.pooling is not None and not _is_linear(files)
    # Prompts of a model with a chat template are instructions in it, which are part of the template's prompts.
    has_prompts = bool(files.modules.kinds) and not is_stored and not is_embedding_model
    # A cross-encoder of sentence-transformers has its default prompt before the first text of a pair only.
    prompts = prompts_of(files.settings, directory / SETTINGS, ("query",)) if has_prompts else {}
    return with_head(replace(source_of(kind, files), prompts=prompts), head)


def new(source: ModelSource, model: CrossEncoderOptions) -> ModelSource:
    """A model of random weights."""
    head = new_score_head(source.config, "model.config")
    return with_head(source, replace(head, template=pair_template(model.pair_template)))


def with_head(source: ModelSource, head: HeadSource) -> ModelSource:
    """The model with a head; the prompts of its template are those that the files do not have."""
    prompts = {} if head.template is None else dict(head.template.prompts)
    return replace(
        source,
        settings=head,
        prompts=prompts | source.prompts,
        vectors=replace(
            source.vectors,
            pooling=score_pooling(source.config) if head.vision is None else Pooling.last,
            include_prompt=True,
            normalize=False,
        ),
    )


def _is_linear(files: StoredModel) -> bool:
    """Whether the head is a linear layer on a token vector, as a module of sentence-transformers."""
    return files.modules.kinds == SCORE_MODULES and files.settings.get("model_type") == CROSS_ENCODER


def _read_head(files: StoredModel, config: PretrainedConfig, model: CrossEncoderOptions) -> HeadSource:
    """The head of the model in a directory, whose configuration becomes that of a classifier of one label.

    A ModelError if the directory holds a classifier of several labels without `score_labels`, its architecture has
    none, or its pairs cannot be read as sentence-transformers does; a ConfigError if options have no effect.
    """
    directory, modules = files.directory, files.modules.kinds
    if config.model_type in FAMILIES:
        return _read_vision_head(files, config, model)
    require_no_image_options(model.image)
    is_classifier = is_reranker(config)
    num_labels = int(config.num_labels) if is_classifier else 1
    labels = _score_labels(directory, config, model, num_labels)
    is_linear = _is_linear(files)
    if (
        not is_linear
        and files.settings.get("model_type") == CROSS_ENCODER
        and set(modules) - {"Transformer", LOGIT_SCORE}
    ):
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(modules)}; supported in a cross-encoder are "
            f"Transformer, Transformer and {LOGIT_SCORE}, or {', '.join(SCORE_MODULES)}"
        )
    if is_classifier and getattr(config, "classifier_pooling", None) == LATE:
        raise ModelError(
            f"{directory / 'config.json'}: classifier_pooling={LATE} scores every token and takes the mean; "
            "supported are bos, cls and mean"
        )
    # That of several labels is a softmax, or none; the sigmoid of a difference of two is the softmax of the first.
    activation = SIGMOID if labels else _activation(config, files.settings)
    note = ""
    if "Pooling" in modules and not is_linear:
        note = f"{directory} is an embedding model: its backbone is used, its pooling is not"
    if labels:
        config.problem_type = None  # transformers rejects single_label_classification with a single label
    new_score_head(config, str(directory))
    name = model.pair_template if isinstance(model.pair_template, str) else published_template(str(model.path))
    template = pair_template(model.pair_template) or _stored_template(files, config, model)
    if template is None and name is not None:
        template, note = PAIR_TEMPLATES[name], f"pairs are formatted for {name}, by the name of {model.path}"
    tokens: tuple[int, ...] = ()
    option = "score_tokens" if model.score_tokens is not None else "score_head"
    if is_linear and (model.score_tokens is not None or model.score_head is ScoreHead.tokens):
        raise ConfigError(f"{model_option(option)}: {directory} has a head of its own, a Dense module; leave it out")
    if not is_linear and _has_score_tokens(files, config, model, name):
        tokens = _score_tokens(files, config, model, name)
        if template is not None and template.special_tokens:
            # The token is predicted after the template's end, and no end-of-text token may follow it.
            template = replace(template, special_tokens=False, bos=True)
    linear = _linear_head(files, config) if is_linear else None
    is_new = not is_classifier and not tokens and linear is None
    return HeadSource(
        is_new=is_new,
        activation=activation,
        tokens=tokens,
        labels=labels,
        num_labels=num_labels,
        linear=linear,
        note=note,
        template=template,
    )


def _read_vision_head(files: StoredModel, config: PretrainedConfig, model: CrossEncoderOptions) -> HeadSource:
    """The head of a vision-language model, which is the score of tokens after a pair.

    A ModelError for a family whose language model predicts no tokens after an item, or a directory whose pairs cannot
    be read; a ConfigError for options of other models, and without a template of pairs.
    """
    directory, modules = files.directory, files.modules
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or config.model_type == "paligemma":
        raise ModelError(
            f"{directory} holds {config.model_type}, and model.kind=cross_encoder trains, of vision-language models, "
            "qwen2_vl, qwen2_5_vl, qwen3_vl, idefics3 and smolvlm, which answer yes or no"
        )
    if files.settings.get("model_type") == CROSS_ENCODER and not modules.is_scorer:
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(modules.kinds)}; supported in a cross-encoder of "
            f"a vision-language model are Transformer and {LOGIT_SCORE}"
        )
    check, defaults = OptionChecks(model, "model."), CrossEncoderOptions()
    for option in ("bidirectional", "rope_theta", "rope_scaling", "score_labels"):
        reason = "is not for a vision-language model; leave it out"
        check.require(getattr(model, option) == getattr(defaults, option), option, reason)
    check.require(
        model.score_head is not ScoreHead.classification,
        "score_head",
        "is for models of texts: transformers has no class that scores texts and pictures; leave it out",
    )
    if further := set(files.transformer.get("processing_kwargs") or {}) - {"chat_template"}:
        raise ModelError(
            f"{directory}: processing_kwargs of sentence-transformers has {', '.join(sorted(map(str, further)))}; "
            "supported with a vision-language model is chat_template"
        )
    tokenizer = read_tokenizer(directory, trust_remote_code=model.trust_remote_code)
    name = model.pair_template if isinstance(model.pair_template, str) else published_template(str(model.path))
    chat = stored_chat_template(directory, tokenizer) if modules.is_scorer else None
    template, note = pair_template(model.pair_template), ""
    picture, token = picture_text(tokenizer, config), picture_token(tokenizer, config)
    if template is None and chat is not None:
        tokenizer.chat_template = chat
        template, options = _read_chat_pairs(files, tokenizer, True)
        picture = read_pair_picture(tokenizer, str(directory), token, options)
        template = _with_bos(template, tokenizer, directory)
    elif template is None and name is not None:
        template, note = PAIR_TEMPLATES[name], f"pairs are formatted for {name}, by the name of {model.path}"
    if template is None:
        raise ConfigError(
            f"{model_option('pair_template')}=null: {directory} does not say how it reads pairs; set it to qwen3_vl, "
            "or to a mapping of prefix, query, document and suffix"
        )
    if template.special_tokens:
        template = replace(template, special_tokens=False, bos=True)
    if "Pooling" in modules.kinds:
        note = f"{directory} is an embedding model: its backbone is used, its pooling is not"
    processing, processor = read_processing(directory, config, model.image)
    around = ItemTemplate(starts=("", ""), prompted=(("", ""),) * 2, end="", picture=picture, special_tokens=False)
    return HeadSource(
        is_new=False,
        activation=_activation(config, files.settings),
        tokens=_score_tokens(files, config, model, name),
        note=note,
        template=template,
        vision=VisionSettings(
            processing=processing,
            processor=processor,
            template=around,
            chat_template="",  # an export has one that writes `template`
            chat_options={},
            frozen=model.image.frozen,
        ),
    )


def _with_bos(template: PairTemplate, tokenizer: PreTrainedTokenizerBase, directory: Path) -> PairTemplate:
    """The template of a rendered text, to which a processor adds the tokenizer's special tokens unless it has bos."""
    start = "".join((*template.prefix, template.query[0], template.prompts.get("query", "")))
    alone, complete = (FastTokenizer(tokenizer, special_tokens=special).ids(["a"], 100)[0] for special in (False, True))
    if complete == alone or (tokenizer.bos_token and start.startswith(tokenizer.bos_token)):
        return template
    if complete != [tokenizer.bos_token_id, *alone]:
        raise ModelError(f"{directory}: its tokenizer adds tokens behind texts, where the score of a pair is read")
    return replace(template, bos=True)


def _score_labels(
    directory: Path, config: PretrainedConfig, model: CrossEncoderOptions, num_labels: int
) -> tuple[int, ...]:
    """The labels whose logits are the score; none of a classifier of one label, and of other models."""
    labels, where = model.score_labels, directory / "config.json"
    if labels is None and num_labels == 1:
        return ()
    if labels is None:
        raise ModelError(
            f"{where}: {_architecture(config)} has {num_labels} labels, and the score of a cross-encoder is a single "
            f"one; to train, evaluate, search or mine with the logit of label 1 minus that of label 0, set "
            f"{model_option('score_labels')}=[1,0]"
        )
    option = f"{model_option('score_labels')}={written(labels)}"
    if num_labels == 1:
        raise ConfigError(f"{option}: {where} is of {_architecture(config)} without several labels; leave it out")
    if max(labels) >= num_labels:
        raise ConfigError(
            f"{option}: {_architecture(config)} has the labels 0 to {num_labels - 1}, see id2label in {where}"
        )
    return tuple(labels)


def _linear_head(files: StoredModel, config: PretrainedConfig) -> Path:
    """The directory of a Dense module that is the head; a ModelError if the class's own head cannot represent it."""
    (directory,) = (dense.directory for dense in files.modules.dense)
    assert directory is not None
    settings = read_json(directory / "config.json")
    activation, num_outputs = (settings.get(name) for name in ("activation_function", "out_features"))
    if not is_decoder(config) or files.modules.pooling is not Pooling.last:
        pooling = written(files.modules.pooling) if files.modules.pooling is not None else "none"
        raise ModelError(
            f"{files.directory / 'modules.json'}: a head of {', '.join(SCORE_MODULES)} on the {pooling} token of "
            f"{config.model_type}; supported is the last token of a decoder, because the classes of encoders have more "
            "than a linear layer"
        )
    if activation != IDENTITY or num_outputs != 1:
        raise ModelError(
            f"{directory / 'config.json'}: activation_function={activation} and {num_outputs} outputs; a head has "
            f"{IDENTITY} and 1 output"
        )
    weights = directory / "model.safetensors"
    if settings.get("bias", True) and weights.is_file():
        with safe_open(weights, framework="pt") as file:
            if "linear.bias" in file.keys() and file.get_tensor("linear.bias").any():  # noqa: SIM118 - not a dict
                raise ModelError(f"{weights}: linear.bias is not 0, and classes of decoders score without a bias")
    return directory


def _has_score_tokens(
    files: StoredModel, config: PretrainedConfig, model: CrossEncoderOptions, name: str | None
) -> bool:
    """Whether the head starts from rows of the vocabulary head."""
    is_causal = any(architecture.endswith(_CAUSAL) for architecture in config.architectures or ())
    is_requested = model.score_head is ScoreHead.tokens or model.score_tokens is not None
    option = (
        "model.score_head=tokens"
        if model.score_tokens is None
        else f"{model_option('score_tokens')}={model.score_tokens}"
    )
    if is_requested and is_reranker(config):
        raise ConfigError(
            f"{option}: {files.directory} is a {_architecture(config)}, which has a head of its own and no vocabulary "
            "head; leave it out"
        )
    if is_requested and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{option}: {config.model_type} is no causal language model; leave it out")
    if model.score_head is ScoreHead.classification or is_reranker(config):
        return False
    return is_requested or bool(files.modules.logit_score) or (is_causal and name is not None)


def _score_tokens(
    files: StoredModel, config: PretrainedConfig, model: CrossEncoderOptions, name: str | None
) -> tuple[int, ...]:
    """The ids of the tokens: those of a LogitScore directory, the option's, or the template's."""
    for setting, neutral in _LOGIT_SETTINGS.items():
        value = getattr(config.get_text_config(), setting, neutral)
        if value is not None and value != neutral:
            raise ModelError(
                f"{files.directory / 'config.json'}: {setting}={value} changes logits, which a score of tokens does "
                "not support; set model.score_head=classification to train a new head"
            )
    if files.modules.logit_score:
        if model.score_tokens is not None:
            raise ConfigError(
                f"{model_option('score_tokens')}={model.score_tokens}: {files.directory} is a {LOGIT_SCORE} "
                "directory, which has "
                "its own; leave it out"
            )
        return _stored_ids(files, int(config.get_text_config().vocab_size))
    tokens = model.score_tokens or SCORE_TOKENS.get(name or "")
    if tokens is None:
        raise ConfigError(
            f"model.score_head=tokens: {files.directory} does not name its tokens; set "
            f"{model_option('score_tokens')}, such as "
            f"[yes, no], or a named {model_option('pair_template')}"
        )
    tokenizer = _tokenizer(files, model)
    return tuple(_single_id(tokenizer, token, tokens) for token in tokens)


def _stored_ids(files: StoredModel, vocab_size: int) -> tuple[int, ...]:
    ids = [files.modules.logit_score.get(key) for key in ("true_token_id", "false_token_id")]
    ids = ids[:1] if ids[1] is None else ids
    if not all(isinstance(number, int) and 0 <= number < vocab_size for number in ids):
        raise ModelError(
            f"{files.directory}: {LOGIT_SCORE} has the tokens {ids}, which are not ids from 0 to {vocab_size - 1}"
        )
    return tuple(map(int, ids))  # type: ignore[arg-type]


def _single_id(tokenizer: PreTrainedTokenizerBase, token: str, tokens: Sequence[str]) -> int:
    ids: list[int] = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        parts = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids)))
        raise ConfigError(
            f"{model_option('score_tokens')}={list(tokens)}: {token!r} is {len(ids)} tokens of the tokenizer "
            f"({parts}), and must "
            "be exactly one it knows; capitals and spaces count"
        )
    return ids[0]


def _tokenizer(files: StoredModel, model: CrossEncoderOptions) -> PreTrainedTokenizerBase:
    directory = files.directory
    if model.tokenizer is not None:
        options = "model.tokenizer", "model.tokenizer_revision"
        directory = resolve_directory(model.tokenizer, model.tokenizer_revision, *options, TOKENIZER_FILES)
    return read_tokenizer(directory, trust_remote_code=model.trust_remote_code)


def _stored_template(files: StoredModel, config: PretrainedConfig, model: CrossEncoderOptions) -> PairTemplate | None:
    """What the directory's chat template renders, if sentence-transformers uses it for pairs."""
    modalities = files.transformer.get("modality_config")
    message = modalities.get("message") if isinstance(modalities, dict) else None
    if not is_decoder(config) or not (message or (files.modules.logit_score and modalities is None)):
        return None
    tokenizer = read_tokenizer(files.directory, trust_remote_code=model.trust_remote_code)
    if tokenizer.chat_template is None:
        return None
    styles = {"flat": False, "structured": True}
    structured = styles.get(str(message.get("format"))) if isinstance(message, dict) else None
    return _read_chat_pairs(files, tokenizer, structured)[0]


def _read_chat_pairs(
    files: StoredModel, tokenizer: PreTrainedTokenizerBase, structured: bool | None
) -> tuple[PairTemplate, dict[str, Any]]:
    """What the tokenizer's chat template renders of pairs with the settings of a directory, and its options."""
    prompts, default = files.settings.get("prompts") or {}, files.settings.get("default_prompt_name")
    processing = files.transformer.get("processing_kwargs")
    stored = processing.get("chat_template") if isinstance(processing, dict) else None
    options = {k: v for k, v in stored.items() if k != "restore_suffix"} if isinstance(stored, dict) else {}
    template = read_chat_template(
        tokenizer,
        str(files.directory),
        structured=structured,
        instruction=prompts.get(default) if isinstance(prompts, dict) and default else None,
        options=options,
    )
    return template, options


def _architecture(config: PretrainedConfig) -> str:
    return ", ".join(config.architectures or [config.model_type])


def _activation(config: PretrainedConfig, settings: Mapping[str, Any]) -> str:
    """In the order in which sentence-transformers (6.2) reads it, which ignores names of code outside of torch."""
    stored = config.to_dict()
    nested = stored.get("sentence_transformers")
    for name in (
        settings.get("activation_fn"),
        nested.get("activation_fn") if isinstance(nested, dict) else None,
        stored.get("sbert_ce_default_activation_function"),
    ):
        if isinstance(name, str) and name.startswith("torch.nn."):
            return name
    return SIGMOID
