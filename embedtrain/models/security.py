"""Security checks of a model directory, before any library reads it: it may not run code or refer to other files.

The libraries obey more than the weights of a directory: arguments that are passed to `from_pretrained`, classes by
name, attention kernels from other repositories. These checks reject such settings; `file_references.py` has those of
files. What a file decides, such as a template or a regular expression, runs in a process that is ended when it needs
too much time or memory.
"""

import contextlib
import json
import os
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase, dynamic_module_utils

from embedtrain.errors import ModelError
from embedtrain.models.file_references import (
    json_values,
    read_json,
    require_own_file,
    require_own_files,
    require_own_settings,
)
from embedtrain.utils.formatting import format_bytes, one_line

# Arguments for `from_pretrained` that sentence-transformers' settings may hold: none of them selects code or files.
# sentence-transformers removes trust_remote_code itself.
_SAFE_ARGUMENTS = {
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
_FORWARDED = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
# Limits of the numbers in config.json, by parts of their names: libraries make lists of layers, heads and labels, and
# position ids, before any weight is read. Sizes of weights need none: they are compared with the stored weights.
_LIMITS = (
    (re.compile(r"^(num|n)_.*(layers?|heads?|blocks|experts)$|^n_(layers?|heads?)$"), 0, 10_000),
    (re.compile(r"(layers?|heads?|blocks|experts)$"), -10_000, 10_000),  # -2 is the last but one
    (re.compile(r"position|_ctx$|seq_len"), -1, 1 << 24),  # XLNet has -1 positions
    (re.compile(r"^(num|n)_"), -1, 1_000_000),
)
# The same for tokenizer_config.json and added_tokens.json, such as `extra_ids`; maximal lengths may be anything.
_MAX_TOKENS = 10_000_000
_PROBE_LENGTH = 64
# Texts for which regular expressions that backtrack need very long, and the seconds that a tokenizer may need for all.
_LONG_PROBES = tuple(part * 1000 + "!" for part in ("a", " ", "1", "\n", "a ", "A1b2 ", "-", "\u4e00"))
_PROBE_SECONDS = 60
_MEMORY = 1 << 30  # bytes in addition to those of this process


def require_safe_files(directory: Path, *, trust_remote_code: bool) -> None:
    """Reject a model directory whose files would run code or refer to other files.

    With `trust_remote_code`, only references to other files are rejected. The ModelError names the file and setting.
    """
    # Otherwise transformers prompts at the terminal whether code may run, wherever it does not pass the setting on.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    require_own_files(directory)
    require_own_settings(directory)
    require_bounded_numbers(directory / "config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (directory / name).is_file():
            _check_token_numbers(directory / name)
    for path in sorted(directory.glob("*.index.json")):
        weight_files(path)
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory / 'adapter_config.json'} makes this an adapter of another model: set the path to "
            f"that model, and use this directory as its adapter (model.lora.path={directory} in a recipe)"
        )
    if trust_remote_code:
        return
    for path in sorted(directory.glob("sentence_*_config.json")):
        _check_arguments(path)
    for name in ("config.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            _check_tokenizer_class(directory / name)


def require_safe_config(config: PretrainedConfig, where: str) -> None:
    """Reject an attention kernel that would be downloaded."""
    # A private name of transformers, as of version 5.23; `attn_implementation` in a config.json ends there.
    implementation = str(config._attn_implementation or "")
    if "/" in implementation:
        raise ModelError(f"{where}: attn_implementation={implementation} is code of a Hub repository: remove that line")


def require_bounded_numbers(path: Path) -> None:
    """Reject numbers in a config.json, if it exists, for which transformers would need unbounded memory or time."""
    for key, number in _numbers(read_json(path)) if path.is_file() else ():
        for pattern, low, high in _LIMITS:
            if pattern.search(key):
                if not low <= number <= high:
                    raise ModelError(f"{path}: {key}={number}; allowed are {low:,} to {high:,}")
                break


def require_no_links(directory: Path) -> None:
    """Reject links in a directory that will be copied: the files they point to would be published with it."""
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            raise ModelError(f"{path} is a link to {path.readlink()}, which would be copied: replace it by a file")


def weight_files(index: Path) -> list[Path]:
    """The files that an index of weights names, without duplicates; a ModelError if one is outside its directory."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} cannot be read: it has no `weight_map` of keys to files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"{index} names {name}, outside its own directory")
        require_own_file(index.parent / name, index.parent)
    return [index.parent / name for name in names]


def _check_token_numbers(path: Path) -> None:
    settings = read_json(path)
    for key, number in _numbers(settings):
        if number > _MAX_TOKENS and "max_len" not in key and "max_length" not in key:
            raise ModelError(f"{path}: {key}={number}; at most {_MAX_TOKENS:,} tokens are allowed")
    added = settings.get("added_tokens_decoder")
    for key in added if isinstance(added, dict) else ():
        if not key.isdecimal() or len(key) > len(str(_MAX_TOKENS)):
            raise ModelError(f"{path}: added_tokens_decoder has {key!r:.100}, which is not an id below {_MAX_TOKENS:,}")


def _numbers(settings: Any) -> Iterator[tuple[str, int]]:
    return ((key, value) for key, value in json_values(settings) if isinstance(value, int))


def _check_arguments(path: Path) -> None:
    """For example, `weights_only` allows arbitrary pickles, and `attn_implementation` downloads kernels."""
    settings: Mapping[str, Any] = read_json(path)
    for key in _FORWARDED:
        arguments = settings.get(key) or {}
        if not isinstance(arguments, dict):
            raise ModelError(f"{path}: {key}={arguments!r} is not a mapping: remove it")
        unknown = sorted(set(arguments) - _SAFE_ARGUMENTS)
        if unknown:
            raise ModelError(
                f"{path}: {key} passes {unknown[0]} to transformers, which a model's files may not decide: remove it"
            )


def _check_tokenizer_class(path: Path) -> None:
    """Transformers calls `from_pretrained` of any class of this name, and prompts at the terminal about code."""
    name = read_json(path).get("tokenizer_class")
    if name is None:
        return
    candidates = [name] if isinstance(name, str) else []
    while candidates and candidates[-1].endswith("Fast"):  # transformers strips this suffix until it finds a class
        candidates.append(candidates[-1].removesuffix("Fast"))
    # An unknown name is harmless: transformers then picks a tokenizer that fits the files.
    classes = [getattr(transformers, candidate) for candidate in candidates if hasattr(transformers, candidate)]
    if not candidates or not all(isinstance(cls, type) and issubclass(cls, PreTrainedTokenizerBase) for cls in classes):
        raise ModelError(
            f"{path}: tokenizer_class={name} is not a tokenizer class of transformers, or its package is not installed"
        )


def require_bounded_time(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Reject a tokenizer whose regular expressions fail, or need more than a minute, on texts of repeated characters.

    Others may need long for other texts: Oniguruma's limit is 10^7 steps for each character where a match may start.
    """
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            for text in _LONG_PROBES:
                tokenizer([text], truncation=True, max_length=_PROBE_LENGTH)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if thread.is_alive():
        raise ModelError(
            f"the tokenizer of {where} needs more than {_PROBE_SECONDS} s for {len(_LONG_PROBES)} texts of repeated "
            "characters: a regular expression in its tokenizer.json backtracks without end"
        )
    for error in errors:
        raise ModelError(f"the tokenizer of {where} cannot encode texts: {one_line(error)}") from None


class BoundExceeded(Exception):
    """The process was ended; the message is what it needed, the end of a sentence."""


def run_bounded(function: Callable[[], Any], seconds: float) -> Any:
    """The result of a function, a JSON value, from a copy of this process that is ended after `seconds`.

    The function must use neither a device nor threads, which a copy does not have. Raises BoundExceeded if it needs
    more time, or more than 1 GiB of memory, or raises anything.
    """
    memory = psutil.Process().memory_info().vms + _MEMORY
    reading, writing = os.pipe()
    # A copy needs milliseconds; a new Python that imports transformers would need seconds.
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(function, writing, seconds, memory)
    os.close(writing)
    try:
        content = _read_until(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if content is None:
        raise BoundExceeded(f"needs more than {seconds:g} s")
    if not content:
        raise BoundExceeded("ends the process that it runs in")
    answer = json.loads(content)
    if "error" in answer:
        raise BoundExceeded(answer["error"])
    return answer["result"]


def _answer(function: Callable[[], Any], writing: int, seconds: float, memory: int) -> None:
    """Write the function's result to a pipe and end this process, whatever happens."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # If the parent is killed, nobody else ends this process.
        _lower(resource.RLIMIT_CPU, int(seconds) + 1)
        _lower(resource.RLIMIT_AS, memory)
        _lower(resource.RLIMIT_CORE, 0)
        try:
            answer = {"result": function()}
        except MemoryError:
            answer = {"error": f"needs more than {format_bytes(_MEMORY, binary=True)} of memory"}
        except BaseException as error:
            answer = {"error": f"raises {type(error).__name__}: {str(error)[:200]}"}
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
    finally:
        os._exit(0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read_until(reading: int, deadline: float) -> bytes | None:
    """What is written until the pipe is closed; None if that is after the deadline."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
