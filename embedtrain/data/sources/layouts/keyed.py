"""Further layouts with fixed keys: Tevatron, ms-swift, NeMo and BEIR."""

from typing import Any

from embedtrain.config.row_requirements import ScoreRequirement
from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.base import (
    DocumentLookup,
    RowLayout,
    id_list,
    lookup_texts,
    losses_with_scores,
    passages,
    reject_media,
    require_keys,
)
from embedtrain.data.sources.values import BadRow, describe_value
from embedtrain.data.texts import Texts


class TevatronPassages(RowLayout):
    """Rows `{"query", "positive_passages": [{"docid", "title", "text"}, ...], "negative_passages": [...]}`.

    The text of a document is `title + " " + text`. https://github.com/texttron/tevatron
    """

    name = "Tevatron passages"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Texts:
        require_keys(row, "query", "positive_passages")
        query = values.text(row["query"], '"query"')
        positives, positive_ids = passages(row["positive_passages"], '"positive_passages"', "docid")
        self._require_positives(positives, '"positive_passages"')
        negatives, negative_ids = passages(row.get("negative_passages"), '"negative_passages"', "docid")
        self._ignore_except(row, "query", "positive_passages", "negative_passages")
        if positive_ids or negative_ids:
            self.features["ids"] = None
        return Texts(query, positives, negatives, 0, positive_ids=positive_ids, negative_ids=negative_ids)


class TevatronIds(RowLayout):
    """Rows `{"query_text", "positive_document_ids": [...], "negative_document_ids": [...]}` and a corpus.

    The query's key may also be `query`. https://github.com/texttron/tevatron
    """

    name = "Tevatron rows with ids of documents of a corpus"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Texts:
        reject_media(row, "this row")
        key = "query" if "query_text" not in row and "query" in row else "query_text"
        require_keys(row, key, "positive_document_ids")
        query = values.text(row[key], f'"{key}"')
        positive_ids = id_list(row["positive_document_ids"], '"positive_document_ids"')
        negative_ids = id_list(row.get("negative_document_ids"), '"negative_document_ids"')
        self._require_positives(positive_ids, '"positive_document_ids"')
        present = {name: value for name, value in row.items() if value is not None}
        self._ignore_except(present, key, "positive_document_ids", "negative_document_ids")
        return Texts(
            query,
            lookup_texts(positive_ids, '"positive_document_ids"', documents),
            lookup_texts(negative_ids, '"negative_document_ids"', documents),
            0,
            positive_ids=tuple(positive_ids),
            negative_ids=tuple(negative_ids),
        )


class NemoRows(RowLayout):
    """Rows `{"question" or "query": str, "pos_doc": ..., "neg_doc": ...}` of NeMo Automodel.

    Documents are a text, a list of texts, objects `{"text", "id"?}`, or objects `{"id"}` of a corpus.
    https://github.com/NVIDIA-NeMo/Automodel
    """

    name = "NeMo rows"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Texts:
        key = "query" if "query" in row else "question"
        require_keys(row, key, "pos_doc")
        query = values.text(row[key], f'"{key}"')
        positives, positive_ids = _nemo_documents(row["pos_doc"], '"pos_doc"', documents)
        negatives, negative_ids = _nemo_documents(row.get("neg_doc"), '"neg_doc"', documents)
        self._require_positives(positives, '"pos_doc"')
        self._ignore_except(row, key, "pos_doc", "neg_doc")
        if positive_ids or negative_ids:
            self.features["ids"] = None
        return Texts(query, positives, negatives, 0, positive_ids=positive_ids, negative_ids=negative_ids)


def _nemo_documents(value: Any, name: str, documents: DocumentLookup | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and ids."""
    if value is None:
        return (), ()
    elements = value if isinstance(value, list) else [value]
    if not any(isinstance(element, dict) for element in elements):
        return tuple(values.texts(value, name)), ()
    if all(isinstance(element, dict) and "text" not in element for element in elements):
        ids = id_list([element.get("id") for element in elements], name)
        return lookup_texts(ids, name, documents), tuple(ids)
    return passages(elements, name, "id")


class MsSwiftMessages(RowLayout):
    """Rows `{"messages": [...], "positive_messages": [[...], ...], "negative_messages": [[...], ...]}` of ms-swift.

    A message is `{"role", "content"}`. A system message at the beginning is an instruction; the contents after it,
    joined by line breaks, are the text. `label` or `score` is the score of a pair.
    https://swift.readthedocs.io/en/latest/BestPractices/Embedding.html
    """

    name = "messages (ms-swift)"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Texts:
        reject_media(row, "this row")
        require_keys(row, "messages", "positive_messages")
        instruction, query = _parse_conversation(row["messages"], '"messages"')
        positives = _parse_conversations(row["positive_messages"], '"positive_messages"')
        negatives = _parse_conversations(row.get("negative_messages"), '"negative_messages"')
        self._require_positives(positives, '"positive_messages"')
        document_instructions = {system for system, _ in (*positives, *negatives)}
        if len(document_instructions) > 1:
            raise BadRow("the documents of this row have different system messages: a row's must be equal")
        document_instruction = next(iter(document_instructions), None)
        self._ignore_except(row, "messages", "positive_messages", "negative_messages", "label", "score")
        if instruction is not None or document_instruction is not None:
            self.features["instructions"] = None
        scores = self._scores(row, len(positives), len(negatives))
        return Texts(
            query,
            tuple(text for _, text in positives),
            tuple(text for _, text in negatives),
            0,
            positive_scores=tuple(scores[: len(positives)]),
            negative_scores=tuple(scores[len(positives) :]),
            instruction=instruction,
            document_instruction=document_instruction,
        )

    def _scores(self, row: dict[str, Any], num_positives: int, num_negatives: int) -> list[float]:
        key = next((key for key in ("label", "score") if row.get(key) is not None), None)
        if key is None:
            if self.needs.scores == ScoreRequirement.teacher:
                raise BadRow(f'loss={self.needs.loss} needs scores, and this row has no "label" or "score"')
            return []
        if self.needs.scores != ScoreRequirement.none:
            self.features["scores"] = None
            return values.scores(row[key], f'"{key}"', num_positives, num_negatives, 2 + (num_negatives > 0))
        if row[key] != 1:
            raise BadRow(
                f'"{key}" is {describe_value(row[key])}: loss={self.needs.loss} does not use scores, and a pair with a '
                f"score other than 1 is not a positive; losses that use scores: {losses_with_scores()}"
            )
        return []


def _parse_conversations(value: object, name: str) -> list[tuple[str | None, str]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list of conversations, each a list of messages, not {describe_value(value)}")
    return [_parse_conversation(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]


def _parse_conversation(value: object, name: str) -> tuple[str | None, str]:
    """The system message of a conversation, if it has one, and its text."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name} must be a list of messages, not {'empty' if value == [] else describe_value(value)}")
    instruction: str | None = None
    contents: list[str] = []
    for i, message in enumerate(value, 1):
        location = f"message {i} of {name}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise BadRow(f'{location} must be an object with "role" and "content", not {describe_value(message)}')
        content = _parse_content(message["content"], location)
        match message["role"]:
            case "system" if i == 1:
                instruction = values.instruction(content, location)
            case "user" | "assistant":
                contents.append(values.text(content, f'"content" of {location}'))
            case role:
                raise BadRow(
                    f"{location} has the role {describe_value(role)}: allowed are user, assistant, and system at the "
                    "beginning"
                )
    if not contents:
        raise BadRow(f"{name} has no message besides the system message")
    return instruction, "\n".join(contents)


def _parse_content(value: object, name: str) -> object:
    """A message's content; a list of parts, each of which must be a text, is joined."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{name} holds {describe_value(part)}: only texts are trained on")
    return "\n".join(part["text"] for part in value)


class BeirQueries(RowLayout):
    """The judged queries of a BEIR folder, as `retrieval.judged_rows` joins them, and its corpus.

    Where the loss needs scores, the scores of the judgements are used.
    """

    name = "BEIR's judged queries, documents above 0 = positives"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Texts:
        query = values.text(row["query"], "the query")
        if row["negative_ids"]:
            self.features["others that are judged = hard negatives"] = None
        has_scores = self.needs.scores != ScoreRequirement.none
        return Texts(
            query,
            lookup_texts(row["positive_ids"], "the judgement", documents),
            lookup_texts(row["negative_ids"], "the judgement", documents),
            0,
            positive_scores=tuple(row["positive_scores"]) if has_scores else (),
            negative_scores=tuple(row["negative_scores"]) if has_scores else (),
            positive_ids=tuple(row["positive_ids"]),
            negative_ids=tuple(row["negative_ids"]),
        )

    def describe(self) -> str:
        """The layout, and whether there are hard negatives."""
        return ", ".join([self.name, *self.features])
