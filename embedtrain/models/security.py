"""What the files of a model directory may not ask for, looked at before any library does: code, and files elsewhere.

The libraries obey more of a directory than its weights: arguments that are handed on to
`from_pretrained`, classes by name, attention kernels out of another repository. Here is what is refused of them.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase, dynamic_module_utils

from embedtrain.errors import ModelError

# Arguments for `from_pretrained` that sentence-transformers' settings may hold: none of them chooses code or files.
# It takes trust_remote_code out itself.
_HARMLESS_ARGUMENTS = {
    "add_pooling_layer",
    "do_lower_case",
    "dtype",
    "max_length",
    "model_max_length",
    "padding_side",
    "torch_dtype",
    "truncation_side",
    "trust_remote_code",
    "use_fast",
}
_HANDED_ON = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
_MOST_LAYERS = 10_000


def require_safe_files(directory: Path, *, trust_remote_code: bool) -> None:
    """Refuse a model directory whose files ask for more than to be read.

    Args:
        directory: with weights, tokenizer, or both.
        trust_remote_code: whether its authors may run code of theirs; then only what lies elsewhere is refused.

    Raises:
        ModelError: names the file and what it asks for.
    """
    # Else transformers asks at the terminal whether code may run, wherever it hands the answer on as "not said".
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    for path in sorted(directory.glob("*.index.json")):
        weight_files(path)
    if trust_remote_code:
        return
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory / 'adapter_config.json'} makes this an adapter, of a model that lies elsewhere: "
            f"write that model here, and this directory as its adapter (in a recipe model.lora.path={directory})"
        )
    for path in sorted(directory.glob("sentence_*_config.json")):
        _refuse_arguments(path)
    for name in ("config.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            _require_tokenizer_class(directory / name)


def require_safe_config(config: PretrainedConfig, where: str) -> None:
    """Refuse an attention kernel that would be downloaded, and depths that would never be built.

    Raises:
        ModelError: names what the configuration asks for.
    """
    # A private name of transformers, as of version 5.23; `attn_implementation` in a config.json ends there.
    asked = str(config._attn_implementation or "")
    if "/" in asked:
        raise ModelError(f"{where} asks for attention by {asked}, code out of a Hub repository: take that line out")
    depth = config.get_text_config().to_dict().get("num_hidden_layers")
    if isinstance(depth, int) and depth > _MOST_LAYERS:
        raise ModelError(f"{where} asks for {depth} layers; no model has more than {_MOST_LAYERS}")


def require_no_links(directory: Path) -> None:
    """Refuse links in a directory that will be copied whole: what they lead to would be published with it.

    Raises:
        ModelError: names the link and where it leads.
    """
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            raise ModelError(f"{path} is a link to {path.readlink()}, which would be copied: put a file in its place")


def weight_files(index: Path) -> list[Path]:
    """The files that an index of weights names, each once.

    Raises:
        ModelError: it cannot be read, or names a file outside its own directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} cannot be read: it should hold a `weight_map` of keys to files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"{index} names {name}, outside its own directory")
    return [index.parent / name for name in names]


def read_json(path: Path, kind: type = dict) -> Any:
    """What a JSON file holds.

    Raises:
        ModelError: it is missing, damaged, or holds something else than a `kind`.
    """
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:  # the last of thousands of brackets
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, kind):
        raise ModelError(f"{path} should hold a {kind.__name__}, not a {type(content).__name__}")
    return content


def _refuse_arguments(path: Path) -> None:
    """Among others `weights_only` unpickles anything, and `attn_implementation` downloads kernels."""
    settings: Mapping[str, Any] = read_json(path)
    for room in _HANDED_ON:
        given = settings.get(room) or {}
        unknown = sorted(set(given) - _HARMLESS_ARGUMENTS) if isinstance(given, dict) else ["something odd"]
        if unknown:
            raise ModelError(
                f"{path} asks sentence-transformers to hand {unknown[0]} on to transformers ({room}), "
                "which a model's files do not decide here: take it out"
            )


def _require_tokenizer_class(path: Path) -> None:
    """Transformers calls `from_pretrained` of whatever it has under this name, and asks at the terminal about code."""
    name = read_json(path).get("tokenizer_class")
    if name is None:
        return
    candidates = [name] if isinstance(name, str) else []
    while candidates and candidates[-1].endswith("Fast"):  # which transformers takes off until it finds something
        candidates.append(candidates[-1].removesuffix("Fast"))
    # A name that is not there is harmless: transformers then takes a tokenizer that fits the files.
    found = [getattr(transformers, candidate) for candidate in candidates if hasattr(transformers, candidate)]
    if not candidates or not all(isinstance(one, type) and issubclass(one, PreTrainedTokenizerBase) for one in found):
        raise ModelError(
            f"{path}: tokenizer_class={name} is no tokenizer of transformers, or one of a package that is not installed"
        )
