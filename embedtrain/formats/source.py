"""Opens a model: reads pooling, prompts, maximal length and heads from its files, without its weights.

A Hub id (downloaded to a directory), a Hugging Face directory, a sentence-transformers directory and a configuration
without weights all become a `ModelSource`. What only one kind of model has is read by the kind. Two of them are
compared before their weights are combined.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.config.code import code_option
from embedtrain.config.kinds import Kind, kind_of_files, load_kind
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import POOLINGS, ModelConfig, Pooling
from embedtrain.config.validation import model_option, written
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.export_record import verify_settings
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.sentence_transformers import (
    SETTINGS,
    DirectoryModules,
    Module,
    prompts_of,
    read_directory_modules,
    read_transformer_settings,
    task_prompts,
)
from embedtrain.formats.static_embedding import is_static, read_static_config, read_static_max_length
from embedtrain.formats.transformers import check_config, read_config, reject_typos
from embedtrain.models.attention_direction import set_attention_direction
from embedtrain.models.file_references import read_json
from embedtrain.models.pooling import pooling_name
from embedtrain.models.rope import scale_rope, set_rope_theta
from embedtrain.models.security import require_bounded_numbers, require_safe_files
from embedtrain.models.types import ModelSource, Tokenization, VectorSettings
from embedtrain.models.vision_language import FAMILIES
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import one_line

# Entries of a configuration that do not change what an encoder computes.
_INERT = frozenset({
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "id2label", "label2id", "problem_type", "gradient_checkpointing", "_attn_implementation", "auto_map",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "sentence_transformers",
})  # fmt: skip
_INERT_PARTS = ("dropout", "drop_rate")
_MAX_SHOWN = 80  # characters of a value
# Texts whose tokens show lower case, special tokens and the splitting of words.
_PROBES = ("Alpha BETA", "what is 1+1?", "naïve café 東京")


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """What a model directory says of itself, besides weights and tokenizer."""

    root: Path
    directory: Path  # of the transformer
    config: PretrainedConfig  # with the options of the recipe
    modules: DirectoryModules  # of sentence-transformers; without modules.json there are none
    transformer: dict[str, Any]  # the content of sentence_bert_config.json
    settings: dict[str, Any]  # that of config_sentence_transformers.json
    trust_remote_code: bool  # whether Python in the directory may run


@dataclass(kw_only=True)
class CommandModel(ModelConfig):
    """A model that a command opens, before its files have decided of which kind it is: null is the model's own."""

    kind: str = ""  # empty: that of the files

    pooling: str | None = code_option(None, names=POOLINGS)
    normalize: bool | None = None
    similarity: VectorSimilarity | None = None
    hybrid_weights: list[float] | None = None


def open_model_source(model: ModelConfig) -> ModelSource:
    """Find the model and read its configuration files.

    A ConfigError unless one of `model.path` and `model.config` is set, if the pooling is unknown, or an option is not
    supported; a ModelError if there is no such directory or repository, or it cannot be trained here.
    """
    kind = load_kind(model.kind)
    source = kind.assembled(model)
    if source is None:
        source = _from_path(kind, model) if model.config is None else _from_config(kind, model)
    prompts = {"query": model.query_prompt, "document": model.document_prompt}
    return replace(
        source,
        tokenization=replace(source.tokenization, max_length=model.max_length or source.tokenization.max_length),
        prompts=source.prompts
        | task_prompts(model.lora.path)
        | {name: text for name, text in prompts.items() if text is not None},
    )


def with_kind_of_files(model: ModelConfig, named: str | None = None) -> tuple[ModelConfig, str]:
    """The options of a model as those of the kind that a command names, or that its files have; and what these are.

    A model whose files are of another kind is opened as a dense one if an option asks for it, such as `pooling`. Raises
    a ConfigError for an option that the kind does not have, or that commands do not have unless `model` is of the kind.
    """
    directory = resolve_directory(str(model.path), model.revision, model_option("path"), model_option("revision"))
    kind, what = kind_of_files(directory)
    common = {field.name: getattr(model, field.name) for field in fields(ModelConfig) if field.name != "kind"}
    defaults = type(model)()
    chosen = {
        field.name: value
        for field in fields(model)
        if field.name not in (*common, "kind")
        and (value := getattr(model, field.name)) != getattr(defaults, field.name)
    }
    named = named or (model.kind if isinstance(model, CommandModel) else "")
    if named:
        kind = load_kind(named, "kind")
    elif any(name in kind.backbone_options for name in chosen):
        kind = load_kind(ModelConfig.kind)
    for name, value in chosen.items():
        if name not in kind.command_options and not isinstance(model, kind.options):
            raise ConfigError(
                f"{model_option(name)}={written(value)}: {model.path} is {what}, which is opened as a model of the "
                "kind "
                f"{kind.name}, and has no such option; leave it out"
            )
    return kind.model_options(**common, **chosen), what


def require_trained(source: ModelSource, model: ModelConfig, what: str) -> ModelSource:
    """The model itself; a ConfigError if the files lack a part, which would start from the seed, as in a training.

    `model` are the options that opened it, and `what` its files are, in words for the message.
    """
    if not source.has_new_head:
        return source
    pooling = source.vectors.pooling
    if not isinstance(pooling, Pooling) and source.vectors.pooling_directory is None:
        directory = resolve_directory(str(model.path), model.revision, model_option("path"), model_option("revision"))
        stored = read_directory_modules(directory).pooling if (directory / "modules.json").is_file() else None
        if stored is not None and not isinstance(stored, Pooling):
            raise ConfigError(
                f"pooling={pooling}: {model.path} has the weights of {stored}, and those of another class would be "
                f"random; write pooling={stored}"
            )
        raise ConfigError(
            f"pooling={pooling}: {model.path} has no weights of this class, which would be random; train it first"
        )
    raise ConfigError(
        f"kind={source.kind.name}: {model.path} is {what} without the {source.kind.new_part} of this kind, which would "
        "be random; train such a model first, or leave kind out"
    )


def _from_path(kind: Kind, model: ModelConfig) -> ModelSource:
    if not model.path:
        raise ConfigError(f"no model: set {model_option('path')} to a Hub id or a directory, or model.config")
    directory = resolve_directory(model.path, model.revision, model_option("path"), model_option("revision"))
    require_safe_files(directory, trust_remote_code=model.trust_remote_code)
    verify_settings(directory)
    stored, what = kind_of_files(directory)
    if stored is not kind:
        stored.require_other(directory, what, model)
    source = kind.read(directory, model)
    return replace(source, commit=None if expand_user(model.path).is_dir() else directory.name)


def _from_config(kind: Kind, model: ModelConfig) -> ModelSource:
    if model.path is not None:
        raise ConfigError(
            f"{model_option('path')} and model.config are both set: the first loads weights, the second has none; "
            "keep one"
        )
    options: Any = model.config
    try:
        if isinstance(options, str):
            path = expand_user(options)
            require_bounded_numbers(path / "config.json" if path.is_dir() else path)
            config = AutoConfig.from_pretrained(options, trust_remote_code=model.trust_remote_code)
        else:
            values = dict(options)
            model_type = values.pop("model_type")
            reject_typos(values, AutoConfig.for_model(model_type))
            config = AutoConfig.for_model(model_type, **values)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.config: {one_line(error)} (it is a mapping with `model_type`, or the path of a config.json)"
        ) from None
    check_config(config, "model.config")
    source = ModelSource(
        kind=kind,
        directory=None,
        config=_adapted(config, model),
        tokenization=Tokenization(),
        prompts={"query": "", "document": ""},
        trust_remote_code=model.trust_remote_code,
    )
    return kind.new(source, model)


def read_files(directory: Path, model: ModelConfig, route: Sequence[Module] | None = None) -> StoredModel:
    """What a directory says of itself, or of the modules of one route of its Router.

    Raises ConfigError for a table of static embeddings unless the kind has them.
    """
    modules = DirectoryModules(transformer=directory)
    if (directory / "modules.json").is_file():
        modules = read_directory_modules(directory, route)
        modules.require_supported(directory)
    transformer = modules.transformer
    if route is not None:  # may be a model that other software opens alone
        require_safe_files(transformer, trust_remote_code=model.trust_remote_code)
    elif transformer != directory and transformer != directory.resolve():
        require_own_transformer(transformer, directory, model)
    settings = read_transformer_settings(transformer) if modules.kinds else {}
    return StoredModel(
        root=directory,
        directory=transformer,
        config=_adapted(read_static_config(transformer), model)
        if modules.is_static
        else adapted_config(transformer, model),
        modules=modules,
        transformer=settings,
        settings=read_json(directory / SETTINGS) if modules.kinds and (directory / SETTINGS).is_file() else {},
        trust_remote_code=model.trust_remote_code,
    )


def source_of(kind: Kind, files: StoredModel) -> ModelSource:
    """The model in a directory of transformers or sentence-transformers, for a kind that adds what only it has.

    Dense modules, and a user's pooling with its weights, are what only some kinds have.
    """
    modules, settings = files.modules, files.transformer
    if files.config.model_type in FAMILIES and not kind.has_vision:
        raise ModelError(
            f"{files.directory} holds {files.config.model_type}, a vision-language model, which {model_option('kind')}="
            f"{kind.name} does not train; write {model_option('kind')}=dense"
        )
    has_modules = bool(modules.kinds)
    max_length = read_static_max_length(files.directory) if modules.is_static else settings.get("max_seq_length")
    return ModelSource(
        kind=kind,
        directory=files.directory,
        config=files.config,
        vectors=VectorSettings(
            pooling=modules.pooling if isinstance(modules.pooling, Pooling) else Pooling.cls,
            include_prompt=modules.include_prompt,
            normalize=modules.normalize if has_modules else True,
        ),
        tokenization=Tokenization(
            max_length=max_length,
            lowercase=bool(settings.get("do_lower_case")),
            is_sentence_transformers=has_modules,
        ),
        prompts=prompts_of(files.settings, files.root / SETTINGS),
        trust_remote_code=files.trust_remote_code,
    )


def require_own_transformer(transformer: Path, directory: Path, model: ModelConfig) -> None:
    """Raise ModelError if the folder of the transformer is a model of its own, or its files are not safe."""
    if (transformer / "modules.json").is_file():
        raise ModelError(f"{transformer / 'modules.json'} is a second one inside {directory}: remove one of them")
    require_safe_files(transformer, trust_remote_code=model.trust_remote_code)


def adapted_config(directory: Path, model: ModelConfig) -> PretrainedConfig:
    """The configuration of a transformer with the options of the recipe."""
    return _adapted(read_config(directory, trust_remote_code=model.trust_remote_code), model)


def _adapted(config: PretrainedConfig, model: ModelConfig) -> PretrainedConfig:
    if is_static(config) and not load_kind(model.kind).has_tables:
        raise ConfigError(
            f"{model_option('kind')}={model.kind}: the model is a table of static embeddings, which has one vector "
            "of a text; "
            "write dense"
        )
    config = set_attention_direction(config, model.bidirectional)
    set_rope_theta(config, model.rope_theta, "model.rope_theta")
    scale_rope(config, model.rope_scaling)
    return config


def different_setting(first: ModelSource, other: ModelSource) -> str | None:
    """`NAME is VALUE, not VALUE` with the values of `other` and of `first`; None if all settings are equal."""
    expected, actual = all_settings(first), all_settings(other)
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            return f"{name} is {_shown(actual.get(name))}, not {_shown(expected.get(name))}"
    return None


def different_tokens(first: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """How two tokenizers differ, with the values of `other` first; None if their tokens are the same."""
    expected, actual = first.get_vocab(), other.get_vocab()
    if expected != actual:
        token = min(token for token in expected.keys() | actual.keys() if expected.get(token) != actual.get(token))
        return f"their tokenizers differ, the token {token!r} has the id {actual.get(token)}, not {expected.get(token)}"
    for text in _PROBES:
        ids = [tokenizer(text)["input_ids"] for tokenizer in (first, other)]
        if ids[0] != ids[1]:
            return (
                f"their tokenizers have the same vocabulary, but read {text!r} as {_shown(ids[1])}, "
                f"not {_shown(ids[0])}"
            )
    return None


def all_settings(source: ModelSource) -> dict[str, Any]:
    """What a model computes besides its weights, by the names of messages."""
    settings: dict[str, Any] = {
        "kind": source.kind.name,
        "pooling": pooling_name(source.vectors.pooling),
        "pooling of the prompt's tokens": source.vectors.include_prompt,
        "normalisation of vectors": source.vectors.normalize,
        "similarity of vectors": source.vectors.similarity.value,
        "number of Dense heads": len(source.vectors.dense),
        "lower case": source.tokenization.lowercase,
    }
    for index, dense in enumerate(source.vectors.dense):
        settings[f"activation of Dense head {index}"] = dense.activation
    return settings | source.kind.compared_settings(source) | _computing(source.config)


def _computing(config: PretrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    return {
        f"{name} in config.json": value
        for name, value in values.items()
        if name not in _INERT and not any(part in name for part in _INERT_PARTS)
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
