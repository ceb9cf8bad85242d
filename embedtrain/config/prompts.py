"""Warnings about prompts that say what their author did not mean."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from embedtrain.config.recipe import TrainSource

_OPTIONS = ("query_prompt", "document_prompt", "instruction_format")


def prompt_warnings(options: Any) -> list[str]:
    r"""A warning for each prompt and instruction format of a recipe, or of a command's options, with a literal `\n`.

    Neither a shell nor Hydra turns a backslash and an n into a newline, and single quotes in YAML do not either.
    """
    return [
        f"{name} has a backslash and an n, not a newline, and texts are encoded with both characters: write $'{name}="
        r'"first line\nsecond line"'
        "' in bash, or double quotes in YAML"
        for name, text in _prompts(options, "")
        if "\\n" in text
    ]


def untrained_prompt_warnings(sources: Sequence[TrainSource], prompts: Mapping[str, str]) -> list[str]:
    """A warning for each prompt of the model with which no source trains: evaluation and the export have that one.

    `prompts` are the model's, by name: `query` and `document`.
    """
    warnings = []
    for name in ("query", "document"):
        own = [getattr(source, f"{name}_prompt") for source in sources]
        model = prompts.get(name, "")
        if own and None not in own and model not in own:
            warnings.append(
                f"{name}_prompt of the sources ({', '.join(map(repr, dict.fromkeys(own)))}) is for training only, and "
                f"evaluation and the exported model put {model!r} before each {name}: write model.{name}_prompt, which "
                "sources without one of their own have as well"
            )
    return warnings


def _prompts(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _prompts(item, f"{prefix}[{index}]")
    elif is_dataclass(node):
        for field in fields(node):
            name, value = f"{prefix}.{field.name}" if prefix else field.name, getattr(node, field.name)
            if field.name in _OPTIONS and isinstance(value, str):
                yield name, value
            else:
                yield from _prompts(value, name)
