"""ms-swift's rows: query and documents as conversations, each a list of messages."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, DocumentLookup, losses_of_scores, require, with_found
from embedtrain.data.sources.layouts.named import refuse_images
from embedtrain.data.sources.problems import BadRow, told
from embedtrain.data.types import Texts

_READ = ("messages", "positive_messages", "negative_messages", "label", "score")


@dataclass
class Messages:
    """Rows `{"messages": [...], "positive_messages": [[...], ...], "negative_messages": [[...], ...]}`.

    A message is `{"role", "content"}`. A system message at the beginning is an instruction; what follows, joined
    by line ends, is the text. `label` or `score` is what a pair is worth.
    https://swift.readthedocs.io/en/latest/BestPractices/Embedding.html
    """

    needs: RowRequirements = TEXTS_ONLY
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        refuse_images(row, "this row")
        require(row, "messages", "positive_messages")
        instruction, query = _conversation(row["messages"], '"messages"')
        positives = _conversations(row["positive_messages"], '"positive_messages"')
        negatives = _conversations(row.get("negative_messages"), '"negative_messages"')
        if not positives:
            raise BadRow('"positive_messages" is empty: a row needs at least one positive')
        of_documents = {own for own, _ in (*positives, *negatives)}
        if len(of_documents) > 1:
            raise BadRow("the documents of this row have different system messages: a row's must be equal")
        document_instruction = of_documents.pop()
        self.ignored.update((key, None) for key in row if key not in _READ)
        if instruction is not None or document_instruction is not None:
            self.found["instructions"] = None
        texts, worse = [text for _, text in positives], [text for _, text in negatives]
        return values.checked(
            query,
            texts,
            worse,
            scores=self._scores(row, len(texts), len(worse)),
            instruction=instruction,
            document_instruction=document_instruction,
        )

    def told(self) -> str:
        """See Layout."""
        return with_found("messages (ms-swift)", self.found)

    def _scores(self, row: dict[str, Any], positives: int, negatives: int) -> list[float]:
        key = next((key for key in ("label", "score") if row.get(key) is not None), None)
        if key is None:
            if self.needs.scores == ScoreRequirement.teacher:
                raise BadRow(f'loss={self.needs.loss} needs scores, and this row has no "label" or "score"')
            return []
        if self.needs.scores != ScoreRequirement.none:
            self.found["scores"] = None
            return values.scores(row[key], f'"{key}"', positives, negatives, 2 + (negatives > 0))
        if row[key] != 1:
            raise BadRow(
                f'"{key}" is {told(row[key])}: loss={self.needs.loss} has no use for scores, and a pair that is '
                f"not worth 1 is no positive; losses that use scores: {losses_of_scores()}"
            )
        return []


def _conversations(value: object, what: str) -> list[tuple[str | None, str]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{what} must be a list of conversations, each a list of messages, not {told(value)}")
    return [_conversation(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]


def _conversation(value: object, what: str) -> tuple[str | None, str]:
    """The instruction of a conversation, if it has one, and its text."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{what} must be a list of messages, not {'empty' if value == [] else told(value)}")
    instruction: str | None = None
    contents: list[str] = []
    for i, message in enumerate(value, 1):
        name = f"message {i} of {what}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise BadRow(f'{name} must be an object with "role" and "content", not {told(message)}')
        match message["role"]:
            case "system" if i == 1:
                instruction = values.instruction(_content(message["content"], name), name)
            case "user" | "assistant":
                contents.append(values.text(_content(message["content"], name), f'"content" of {name}'))
            case role:
                raise BadRow(f"{name} has the role {told(role)}; read are user, assistant, and system at the beginning")
    if not contents:
        raise BadRow(f"{what} has no message but the system's")
    return instruction, "\n".join(contents)


def _content(value: object, what: str) -> object:
    """A message's text, also where it is a list of parts of which each is a text."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{what} holds {told(part)}: texts alone are trained on")
    return "\n".join(part["text"] for part in value)
