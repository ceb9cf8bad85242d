"""Where a model comes from: what its directory says of pooling, prompts, length, heads and weights.

Four sources end in one `ModelSource`: a Hub id (downloaded to a directory), a Hugging Face directory, a
sentence-transformers directory, and a configuration without weights. Nothing here reads a weight.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import list_repo_files, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.config.schema import ModelConfig, Pooling
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.encoder import ACTIVATIONS, switch_off_unused

# Files of a Hub repository that hold the same weights in formats nobody here reads.
_NEVER_DOWNLOADED = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.pth", "original/*"]

# Position numbers of these models start behind the padding id, so that many fewer tokens fit.
_POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet", "xmod"}

_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_POOLINGS = {"cls": Pooling.cls, "mean": Pooling.mean, "lasttoken": Pooling.last}


@dataclass(frozen=True, kw_only=True)
class DenseSource:
    """A Dense head of a sentence-transformers directory; its weights lie in `directory`."""

    directory: Path
    num_in: int
    num_out: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Everything known of a model before a weight is read.

    Attributes:
        directory: where weights and tokenizer lie; None for a model made from a configuration.
        config: the backbone's configuration, cache switched off.
        max_length: tokens of a text that are kept; None: what the tokenizer and the positions allow.
        prompts: the directory's prompts by name, `query` and `document` among them.
    """

    directory: Path | None
    config: PretrainedConfig
    pooling: Pooling
    normalize: bool
    max_length: int | None
    prompts: dict[str, str] = field(default_factory=dict)
    dense: tuple[DenseSource, ...] = ()
    trust_remote_code: bool = False


def open_source(model: ModelConfig) -> ModelSource:
    """Find the model and read its configuration files.

    Raises:
        ConfigError: neither or both of `model.path` and `model.config`, or no pooling known for it.
        ModelError: no such directory or Hub repository, or one that holds what cannot be trained here.
    """
    if model.config is not None:
        return _from_config(model)
    directory = _directory(str(model.path), model.revision)
    found = _read_modules(directory, model) if (directory / "modules.json").is_file() else _read_plain(directory, model)
    pooling = model.pooling or found.pooling
    return replace(
        found,
        pooling=pooling,
        normalize=found.normalize if model.normalize is None else model.normalize,
        max_length=model.max_length or found.max_length,
        prompts=found.prompts
        | ({"query": model.query_prompt} if model.query_prompt is not None else {})
        | ({"document": model.document_prompt} if model.document_prompt is not None else {}),
    )


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in `tokenizer` (directory or Hub id), else the model's own.

    Raises:
        ModelError: there is none, it has no padding token, or it knows more tokens than the model.
    """
    where = tokenizer or str(source.directory)
    try:
        loaded = AutoTokenizer.from_pretrained(where, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no tokenizer can be read from {where}: {_first_line(error)}") from None
    if loaded.pad_token_id is None:
        if loaded.eos_token_id is None:
            raise ModelError(f"the tokenizer of {where} has neither a padding nor an end-of-text token")
        # Padding is masked out everywhere, so any known token does; LLM tokenizers often have none of their own.
        loaded.pad_token = loaded.eos_token
    return loaded


def check_vocabulary(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that yields ids beyond the embedding table.

    Raises:
        ModelError: with both sizes.
    """
    size = int(source.config.get_text_config().vocab_size)
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= size:
        raise ModelError(
            f"the tokenizer knows ids up to {highest} but the model's embedding table ends at {size - 1}: "
            f"use the tokenizer that belongs to the model"
        )


def text_length(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a text that are kept: what was asked, as far as the model's positions reach.

    Raises:
        ConfigError: more was asked than the model has positions for.
    """
    config = source.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    if limit and config.model_type in _POSITIONS_AFTER_PADDING:
        limit -= int(config.pad_token_id or 0) + 1
    if source.max_length is not None:
        if limit and source.max_length > limit:
            raise ConfigError(
                f"model.max_length={source.max_length} is more than the {limit} tokens that this "
                f"{config.model_type} model has positions for"
            )
        return source.max_length
    # Tokenizers without a limit say 1e30; texts beyond 8192 tokens are asked for by hand.
    return min(length for length in (limit or 8192, int(tokenizer.model_max_length), 8192) if length > 0)


def _directory(path: str, revision: str | None) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"model.path={path}: there is no such directory")
    ignored = list(_NEVER_DOWNLOADED)
    try:
        try:
            if any(name.endswith(".safetensors") for name in list_repo_files(path, revision=revision)):
                ignored.append("*.bin")
        except (OfflineModeIsEnabled, OSError):
            pass  # without the Hub the cached snapshot serves, or the next line says what is missing
        return Path(snapshot_download(path, revision=revision, ignore_patterns=ignored))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ModelError(
            f"model.path={path} is neither a directory nor a model that the Hugging Face Hub gave us "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from None


def _from_config(model: ModelConfig) -> ModelSource:
    if model.path is not None:
        raise ConfigError(
            "model.path and model.config are both set: the first loads weights, the second has none; keep one"
        )
    given: Any = model.config
    try:
        if isinstance(given, str):
            config = AutoConfig.from_pretrained(given, trust_remote_code=model.trust_remote_code)
        else:
            values = dict(given)
            config = AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.config: {_first_line(error)} (it is a mapping with `model_type`, or the path of a config.json)"
        ) from None
    switch_off_unused(config)
    return ModelSource(
        directory=None,
        config=config,
        pooling=_required(model.pooling, "a model made from model.config"),
        normalize=True if model.normalize is None else model.normalize,
        max_length=model.max_length,
        prompts={"query": model.query_prompt or "", "document": model.document_prompt or ""},
        trust_remote_code=model.trust_remote_code,
    )


def _read_plain(directory: Path, model: ModelConfig) -> ModelSource:
    return ModelSource(
        directory=directory,
        config=_config(directory, trust_remote_code=model.trust_remote_code),
        pooling=_required(model.pooling, f"{directory}, which has no modules.json,"),
        normalize=True,
        max_length=None,
        trust_remote_code=model.trust_remote_code,
    )


def _read_modules(directory: Path, model: ModelConfig) -> ModelSource:
    """A sentence-transformers directory. Module types are matched against a list, never imported."""
    transformer, pooling, normalize, dense = directory, None, False, []
    for module in _json(directory / "modules.json"):
        kind = str(module["type"])
        part = (directory / str(module.get("path", ""))).resolve()
        if not part.is_relative_to(directory.resolve()):
            raise ModelError(f"{directory / 'modules.json'} names {part}, outside its own directory")
        match kind.rsplit(".", 1)[-1] if kind.startswith("sentence_transformers.") else kind:
            case "Transformer":
                transformer = part
            case "Pooling":
                pooling = _pooling(part / "config.json")
            case "Normalize":
                normalize = True
            case "Dense":
                dense.append(_dense(part))
            case _:
                raise ModelError(
                    f"{directory / 'modules.json'} asks for a module {kind}, which embedtrain does not know; "
                    f"it trains Transformer, Pooling, Dense and Normalize, and never runs code out of a model directory"
                )
    settings = _json(transformer / "sentence_bert_config.json", missing={})
    own = _json(directory / "config_sentence_transformers.json", missing={})
    prompts = {str(k): str(v) for k, v in (own.get("prompts") or {}).items() if v is not None}
    default = own.get("default_prompt_name")
    if default and prompts.get(default):
        prompts = {"query": prompts[default], "document": prompts[default]} | prompts
    return ModelSource(
        directory=transformer,
        config=_config(transformer, trust_remote_code=model.trust_remote_code),
        pooling=model.pooling or _required(pooling, f"{directory}, whose modules.json has no Pooling,"),
        normalize=normalize,
        max_length=settings.get("max_seq_length"),
        prompts=prompts,
        dense=tuple(dense),
        trust_remote_code=model.trust_remote_code,
    )


def _config(directory: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no model configuration can be read from {directory}: {_first_line(error)}") from None
    switch_off_unused(config)
    return config


def _pooling(path: Path) -> Pooling:
    settings = _json(path)
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes = modes or [name for flag, name in _POOLING_FLAGS.items() if settings.get(flag)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{path} asks for pooling {' + '.join(modes) or 'nothing'}; embedtrain trains {', '.join(_POOLINGS)}"
        )
    if settings.get("include_prompt", True) is False:
        raise ModelError(
            f"{path} leaves the prompt out of pooling (include_prompt: false), which embedtrain cannot train"
        )
    return _POOLINGS[modes[0]]


def _dense(directory: Path) -> DenseSource:
    settings = _json(directory / "config.json")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in ACTIVATIONS:
        raise ModelError(f"{directory / 'config.json'}: activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if settings.get("use_residual"):
        raise ModelError(f"{directory / 'config.json'}: a Dense head with use_residual cannot be trained here")
    return DenseSource(
        directory=directory,
        num_in=int(settings["in_features"]),
        num_out=int(settings["out_features"]),
        bias=bool(settings.get("bias", True)),
        activation=activation,
    )


def _required(pooling: Pooling | None, what: str) -> Pooling:
    if pooling is None:
        raise ConfigError(f"{what} does not say how to pool: set model.pooling to cls, mean or last")
    return pooling


def _json(path: Path, missing: Any = None) -> Any:
    if not path.is_file():
        if missing is not None:
            return missing
        raise ModelError(f"{path} is missing")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
