"""Where a model comes from: what its directory says of pooling, prompts, length, heads and weights.

Four sources end in one `ModelSource`: a Hub id (downloaded to a directory), a Hugging Face directory, a
sentence-transformers directory, and a configuration without weights. Nothing here reads a weight.
"""

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from embedtrain.config.model_checks import include_prompt_error
from embedtrain.config.recipe import ModelConfig, Pooling
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.attention_direction import require_pooling, set_attention_direction
from embedtrain.models.encoder import ACTIVATIONS, switch_off_unused
from embedtrain.models.hub import one_line, resolve_directory
from embedtrain.models.rope import scale
from embedtrain.models.security import read_json, require_safe_config, require_safe_files

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
        config: the backbone's configuration, cache switched off; attention and positions are as they were asked for.
        max_length: tokens of a text that are kept; None: what the tokenizer and the positions allow.
        include_prompt: whether a vector is made of the prompt's tokens too.
        append_eos: whether texts are to end with the end-of-text token; None: what it is, decides.
        is_whole: a sentence-transformers directory, whose tokenizer does what its texts need.
        prompts: the directory's prompts by name, `query` and `document` among them.
        lowercase: whether texts are lowercased before they are tokenised.
        trust_remote_code: whether Python that lies in `directory` may run.
        commit: of the Hub repository that it came from; None for a directory of the user's own.
    """

    directory: Path | None
    config: PretrainedConfig
    pooling: Pooling
    normalize: bool
    max_length: int | None
    include_prompt: bool = True
    append_eos: bool | None = None
    is_whole: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    dense: tuple[DenseSource, ...] = ()
    lowercase: bool = False
    trust_remote_code: bool = False
    commit: str | None = None


def open_model_source(model: ModelConfig) -> ModelSource:
    """Find the model and read its configuration files.

    Raises:
        ConfigError: neither or both of `model.path` and `model.config`, no pooling known for it, or options that a
            model of its kind cannot have.
        ModelError: no such directory or Hub repository, or one that holds what cannot be trained here.
    """
    found = _from_path(model) if model.config is None else _from_config(model)
    config = set_attention_direction(found.config, model.bidirectional)
    scale(config, model.rope_scaling)
    if model.pooling is not None:
        require_pooling(config, model.pooling)
    if model.include_prompt is False and found.pooling is not Pooling.mean:
        raise ConfigError(include_prompt_error(found.pooling))
    return replace(
        found,
        config=config,
        include_prompt=found.include_prompt if model.include_prompt is None else model.include_prompt,
        append_eos=model.append_eos,
    )


def _from_path(model: ModelConfig) -> ModelSource:
    if not model.path:
        raise ConfigError("no model: set model.path to a Hub id or a directory, or model.config")
    directory = resolve_directory(model.path, model.revision, "model.path", "model.revision")
    require_safe_files(directory, trust_remote_code=model.trust_remote_code)
    found = _read_modules(directory, model) if (directory / "modules.json").is_file() else _read_plain(directory, model)
    pooling = model.pooling or found.pooling
    return replace(
        found,
        pooling=pooling,
        commit=None if Path(model.path).expanduser().is_dir() else directory.name,
        normalize=found.normalize if model.normalize is None else model.normalize,
        max_length=model.max_length or found.max_length,
        prompts=found.prompts
        | ({"query": model.query_prompt} if model.query_prompt is not None else {})
        | ({"document": model.document_prompt} if model.document_prompt is not None else {}),
    )


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
            kind = values.pop("model_type")
            _refuse_typos(values, AutoConfig.for_model(kind))
            config = AutoConfig.for_model(kind, **values)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.config: {one_line(error)} (it is a mapping with `model_type`, or the path of a config.json)"
        ) from None
    return ModelSource(
        directory=None,
        config=_usable(config, "model.config"),
        pooling=_required(model.pooling, "a model made from model.config"),
        normalize=True if model.normalize is None else model.normalize,
        max_length=model.max_length,
        prompts={"query": model.query_prompt or "", "document": model.document_prompt or ""},
        trust_remote_code=model.trust_remote_code,
    )


def _refuse_typos(values: dict[str, Any], known: PretrainedConfig) -> None:
    """Transformers keeps a key it does not know without a word, and builds the model without it."""
    for name in values:
        near = difflib.get_close_matches(name, known.to_dict(), n=1, cutoff=0.8)
        if near and not hasattr(known, name):
            raise ConfigError(f"model.config.{name}: a {known.model_type} has no such value; did you mean {near[0]}?")


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
    transformer, pooling, include_prompt, normalize, dense = directory, None, True, False, []
    kinds: list[str] = []
    for module in read_json(directory / "modules.json", list):
        if not isinstance(module, dict) or "type" not in module:
            raise ModelError(f"{directory / 'modules.json'} holds {module!r}, which is not a mapping with `type`")
        kind = str(module["type"])
        part = (directory / str(module.get("path") or "")).resolve()
        if not part.is_relative_to(directory.resolve()):
            raise ModelError(f"{directory / 'modules.json'} names {part}, outside its own directory")
        kinds.append(kind.rsplit(".", 1)[-1] if kind.startswith("sentence_transformers.") else kind)
        match kinds[-1]:
            case "Transformer":
                transformer = part
            case "Pooling":
                pooling, include_prompt = _pooling(part / "config.json")
            case "Normalize":
                normalize = True
            case "Dense":
                dense.append(_dense(part))
            case _:
                raise ModelError(
                    f"{directory / 'modules.json'} asks for a module {kind}, which embedtrain does not know; "
                    f"it trains Transformer, Pooling, Dense and Normalize, and never runs code out of a model directory"
                )
    pools = ["Pooling"] * (pooling is not None)
    if kinds != ["Transformer", *pools, *["Dense"] * len(dense), *["Normalize"] * normalize]:
        raise ModelError(
            f"{directory / 'modules.json'} runs {', '.join(kinds) or 'nothing'}; "
            f"embedtrain trains Transformer, Pooling, any number of Dense, then perhaps Normalize, in this order"
        )
    if transformer != directory.resolve():
        if (transformer / "modules.json").is_file():
            raise ModelError(
                f"{transformer / 'modules.json'} is a second one, within {directory}: take one of them away"
            )
        require_safe_files(transformer, trust_remote_code=model.trust_remote_code)
    settings = _transformer_settings(transformer)
    return ModelSource(
        directory=transformer,
        config=_config(transformer, trust_remote_code=model.trust_remote_code),
        pooling=model.pooling or _required(pooling, f"{directory}, whose modules.json has no Pooling,"),
        normalize=normalize,
        max_length=settings.get("max_seq_length"),
        include_prompt=include_prompt,
        is_whole=True,
        prompts=_prompts(directory / "config_sentence_transformers.json"),
        dense=tuple(dense),
        lowercase=bool(settings.get("do_lower_case")),
        trust_remote_code=model.trust_remote_code,
    )


def _transformer_settings(directory: Path) -> dict[str, Any]:
    """What sentence-transformers adds to a backbone; old versions named the file after the architecture."""
    names = sorted(directory.glob("sentence_*_config.json"), key=lambda path: path.name != "sentence_bert_config.json")
    settings: dict[str, Any] = read_json(names[0]) if names else {}
    length = settings.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ModelError(f"{names[0]}: max_seq_length={length!r} is not a number of tokens")
    return settings


def _prompts(path: Path) -> dict[str, str]:
    own: dict[str, Any] = read_json(path) if path.is_file() else {}
    saved = own.get("prompts") or {}
    if not isinstance(saved, dict):
        raise ModelError(f"{path}: prompts={saved!r} is not a mapping of names to prompts")
    prompts = {str(name): str(text) for name, text in saved.items() if text is not None}
    default = own.get("default_prompt_name")
    if default and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name={default} is none of the prompts {', '.join(prompts) or 'there'}"
        )
    # The other names that sentence-transformers' encode_document looks for.
    for name in ("passage", "corpus"):
        if name in prompts:
            prompts.setdefault("document", prompts[name])
    if default and prompts[default]:
        prompts = {"query": prompts[default], "document": prompts[default]} | prompts
    return prompts


def _config(directory: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    settings = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    if "auto_map" in settings and not trust_remote_code and str(settings.get("model_type")) not in CONFIG_MAPPING:
        raise ModelError(
            f"{directory / 'config.json'} asks for Python that comes with the model (auto_map): read it, and where you "
            "trust its authors set trust_remote_code=true (in a recipe model.trust_remote_code)"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # of values that make no sense transformers raises nearly anything
        raise ModelError(
            f"no model configuration can be read from {directory} ({type(error).__name__}: {one_line(error)})"
        ) from None
    return _usable(config, str(directory))


def _usable(config: PretrainedConfig, where: str) -> PretrainedConfig:
    if config.is_encoder_decoder:
        raise ModelError(
            f"{where} holds a {config.model_type}, an encoder-decoder; embedtrain trains encoders and decoders"
        )
    require_safe_config(config, where)
    switch_off_unused(config)
    return config


def _pooling(path: Path) -> tuple[Pooling, bool]:
    """How vectors are pooled, and whether the prompt's tokens are in them."""
    settings = read_json(path)
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes = modes or [name for flag, name in _POOLING_FLAGS.items() if settings.get(flag)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{path} asks for pooling {' + '.join(modes) or 'nothing'}; embedtrain trains {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]], settings.get("include_prompt", True) is not False


def _dense(directory: Path) -> DenseSource:
    settings = read_json(directory / "config.json")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in ACTIVATIONS:
        raise ModelError(f"{directory / 'config.json'}: activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if settings.get("use_residual"):
        raise ModelError(f"{directory / 'config.json'}: a Dense head with use_residual cannot be trained here")
    sizes = [settings.get("in_features"), settings.get("out_features")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"{directory / 'config.json'}: in_features and out_features must be sizes, not {sizes}")
    return DenseSource(
        directory=directory,
        num_in=sizes[0],
        num_out=sizes[1],
        bias=bool(settings.get("bias", True)),
        activation=activation,
    )


def _required(pooling: Pooling | None, what: str) -> Pooling:
    if pooling is None:
        raise ConfigError(
            f"{what} does not say how to pool: set pooling (in a recipe model.pooling) to cls, mean or last"
        )
    return pooling
