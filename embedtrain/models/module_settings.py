"""Reads the settings of a sentence-transformers directory: modules, pooling, Dense heads, prompts and dimensions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from embedtrain.config.code import is_code_path
from embedtrain.config.heads import HeadInit
from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.recipe import Pooling
from embedtrain.errors import ModelError
from embedtrain.models.encoder import ACTIVATIONS
from embedtrain.models.file_references import read_json, require_own_files
from embedtrain.models.pooling import POOLING
from embedtrain.utils.files import expand_user

SETTINGS = "config_sentence_transformers.json"
TASKS_FOLDER = "adapters"  # of a directory with the adapters of several tasks
# Values of `model_type` in it; of PyLate the second of late interaction.
CROSS_ENCODER, MULTI_VECTOR, PYLATE = "CrossEncoder", "MultiVectorEncoder", "ColBERT"
SPARSE = "SparseEncoder"
_POOLINGS = {mode.stored: pooling for pooling, mode in POOLING.items()}
_POOLING_FLAGS = {mode.flag: mode.stored for mode in POOLING.values()}
_POOLING_FLAGS["pooling_mode_mean_sqrt_len_tokens"] = "mean_sqrt_len_tokens"
OWN_POOLING = "pooling"  # the path of a user's class; its code runs only if the user names it as well
# What is read, and the dimension, which the model's configuration has as well.
POOLING_KEYS = frozenset(
    (*_POOLING_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension")
)
_SENTENCE, _SCORES = "sentence_embedding", "scores"  # what modules read and write
NORMALIZE_KEYS = frozenset(("module_input_name", "module_output_name"))
DENSE_KEYS = NORMALIZE_KEYS | {"in_features", "out_features", "bias", "activation_function", "use_residual"}


@dataclass(frozen=True, kw_only=True)
class DenseSource:
    """A Dense head of a sentence-transformers directory, with its weights in `directory`, or a new one."""

    directory: Path | None  # None: its weights start from the seed
    num_in: int
    num_out: int
    bias: bool
    activation: str
    init: HeadInit | None = None  # of a new one; None: as torch initialises a linear layer
    is_inline: bool = False  # whether its weights are among those of the backbone, in the same files


class Module(NamedTuple):
    """A module of a sentence-transformers directory."""

    kind: str  # the name of its class in sentence-transformers, or the full name of another class
    path: Path
    type: str  # the full name of the class


def read_modules(directory: Path) -> list[Module]:
    """The modules in modules.json. A ModelError if one is outside the directory."""
    modules: list[Module] = []
    for module in read_json(directory / "modules.json", list):
        if not isinstance(module, dict) or "type" not in module:
            raise ModelError(f"{directory / 'modules.json'} holds {module!r}, not a mapping with `type`")
        path = directory / str(module.get("path") or "")
        modules.append(module_at(directory, str(module["type"]), path, directory / "modules.json"))
    return modules


def module_at(directory: Path, kind: str, path: Path, settings: Path) -> Module:
    """The module with this class and folder, which the file `settings` names; ModelError if it is outside."""
    part = path.resolve()
    if not part.is_relative_to(directory.resolve()):
        raise ModelError(f"{settings} names {part}, outside its own directory")
    if part.is_dir():
        require_own_files(part, directory)
    name = kind.rsplit(".", 1)[-1] if kind.startswith("sentence_transformers.") else kind
    return Module(name, part, kind)


def read_transformer_settings(directory: Path) -> dict[str, Any]:
    """Settings that sentence-transformers adds to a backbone; old versions named the file after the architecture."""
    names = sorted(directory.glob("sentence_*_config.json"), key=lambda path: path.name != "sentence_bert_config.json")
    settings: dict[str, Any] = read_json(names[0]) if names else {}
    length = settings.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ModelError(f"{names[0]}: max_seq_length={length!r} is not a number of tokens")
    return settings


def read_truncate_dim(path: Path) -> int | None:
    """The option of this name that sentence-transformers reads from its settings."""
    value = read_json(path).get("truncate_dim") if path.is_file() else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelError(f"{path}: truncate_dim={value!r} is not a number of dimensions")
    return value


def read_similarity(
    settings: Mapping[str, Any], directory: Path, allowed: Sequence[VectorSimilarity]
) -> VectorSimilarity:
    """How sentence-transformers compares vectors according to its settings, by default as the first that is allowed.

    A ModelError for another one.
    """
    value, names = settings.get("similarity_fn_name"), [similarity.value for similarity in allowed]
    if value is not None and value not in names:
        raise ModelError(
            f"{directory / SETTINGS}: similarity_fn_name={value!r:.200} is not supported: allowed are "
            f"{', '.join(names)}"
        )
    return allowed[0] if value is None else VectorSimilarity(value)


def task_prompts(adapter: str | None) -> dict[str, str]:
    """The prompts of the task if the adapter is `DIR/adapters/TASK` of a directory with adapters of several tasks."""
    folder = expand_user(adapter or "").resolve()
    path = folder.parent.parent / SETTINGS
    if adapter is None or folder.parent.name != TASKS_FOLDER or not path.is_file():
        return {}
    saved = prompts_of(read_json(path), path)
    names = {role: f"{folder.name}_{role}" for role in ("query", "document")}
    return {role: saved[name] for role, name in names.items() if name in saved}


def prompts_of(settings: Mapping[str, Any], path: Path, roles: Sequence[str] = ("query", "document")) -> dict[str, str]:
    """The prompts in the settings of a directory, whose file is `path`; `roles` are those that have its default."""
    saved = settings.get("prompts") or {}
    if not isinstance(saved, dict):
        raise ModelError(f"{path}: prompts={saved!r} is not a mapping of names to prompts")
    prompts = {str(name): str(text) for name, text in saved.items() if text is not None}
    default = settings.get("default_prompt_name")
    if default and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name={default} is not one of the prompts {', '.join(prompts) or '(none)'}"
        )
    # Alternative names in sentence-transformers' encode_document.
    for name in ("passage", "corpus"):
        if name in prompts:
            prompts.setdefault("document", prompts[name])
    if default and prompts[default]:
        prompts = dict.fromkeys(roles, prompts[default]) | prompts
    return prompts


def require_known_keys(path: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ModelError for a setting of a module that is not known, and may change what it computes.

    A value that is empty, false or null switches nothing on.
    """
    for name in sorted(settings.keys() - set(known)):
        if settings[name]:
            raise ModelError(
                f"{path}: {name}={settings[name]!r:.80} is not known, and may change the vectors: a newer version of "
                "sentence-transformers may have written it"
            )


def require_embedding(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a module that does not change the embedding of a text, but something beside it.

    The last layer of a cross-encoder makes scores of the embedding.
    """
    for name in ("module_input_name", "module_output_name"):
        allowed = (_SENTENCE, _SCORES) if name == "module_output_name" else (_SENTENCE,)
        if settings.get(name) not in (None, *allowed):
            raise ModelError(f"{path}: {name}={settings[name]!r:.80} is not supported: only {_SENTENCE} is")


def read_pooling(path: Path) -> tuple[Pooling | str, bool]:
    """The pooling, and whether it includes the prompt's tokens."""
    settings = read_json(path)
    if isinstance(own := settings.get(OWN_POOLING), str) and is_code_path(own):
        return own, settings.get("include_prompt", True) is not False
    require_known_keys(path, settings, POOLING_KEYS)
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes = modes or [name for flag, name in _POOLING_FLAGS.items() if settings.get(flag)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{path} has the pooling {' + '.join(modes) or '(none)'}; supported are {', '.join(_POOLINGS)}"
        )
    pooling, include_prompt = _POOLINGS[modes[0]], settings.get("include_prompt", True) is not False
    if pooling is Pooling.weighted_mean and not include_prompt:
        raise ModelError(f"{path}: include_prompt=false is not supported with the pooling weightedmean")
    return pooling, include_prompt


def read_dense(directory: Path) -> DenseSource:
    """A Dense head; a ModelError if it is not supported."""
    settings = read_json(directory / "config.json")
    require_known_keys(directory / "config.json", settings, DENSE_KEYS)
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in ACTIVATIONS:
        raise ModelError(f"{directory / 'config.json'}: activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if settings.get("use_residual"):
        raise ModelError(f"{directory / 'config.json'}: use_residual=true is not supported in a Dense head")
    sizes = [settings.get("in_features"), settings.get("out_features")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(
            f"{directory / 'config.json'}: in_features and out_features must be positive integers, not {sizes}"
        )
    return DenseSource(
        directory=directory,
        num_in=sizes[0],
        num_out=sizes[1],
        bias=bool(settings.get("bias", True)),
        activation=activation,
    )
