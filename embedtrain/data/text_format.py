"""What a model sees around a text: the source's prompt, or the instruction that the row carries instead."""

from typing import Protocol

from embedtrain.data.types import NO_PROMPT, Prompt
from embedtrain.errors import ConfigError


class HasInstructions(Protocol):
    """A row that may carry instructions of its own: an Example or Texts."""

    @property
    def instruction(self) -> str | None:
        """For its query; "" is none, None says nothing."""
        ...

    @property
    def document_instruction(self) -> str | None:
        """For all its documents, likewise."""
        ...


def row_prompts(
    row: HasInstructions, query_prompt: str, document_prompt: str, instruction_format: str
) -> tuple[Prompt, Prompt]:
    """What stands around a row's query, and around its documents.

    Args:
        row: with the instructions it carries.
        query_prompt: the source's, where the row says nothing.
        document_prompt: likewise.
        instruction_format: how an instruction and a text are put together: `{instruction}` and `{text}` stand in it.

    Raises:
        ConfigError: the format is no such one.
    """
    return (
        make_prompt(row.instruction, query_prompt, instruction_format),
        make_prompt(row.document_instruction, document_prompt, instruction_format),
    )


def make_prompt(instruction: str | None, prompt: str, instruction_format: str) -> Prompt:
    """What stands around a text: its row's instruction, or the prompt where the row says nothing."""
    if instruction is None:
        return Prompt(prompt)
    if not instruction:
        return NO_PROMPT
    # Cut before the instruction is put in, which may itself hold "{text}".
    before, text, after = instruction_format.partition("{text}")
    if not text or "{text}" in after or "{instruction}" not in before + after:
        raise ConfigError(
            f"data.instruction_format={instruction_format!r} must hold {{instruction}}, and {{text}} once, such as "
            "'Instruct: {instruction}\\nQuery: {text}'"
        )
    return Prompt(*(part.replace("{instruction}", instruction) for part in (before, after)))
