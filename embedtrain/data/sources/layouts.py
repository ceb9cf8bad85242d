"""Layouts of rows: their interface, and those with fixed keys: FlagEmbedding, Tevatron, ms-swift, NeMo and BEIR."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from embedtrain.config.losses import LOSSES, CombinedConfig, SentenceTransformersConfig
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.rows import ORIGIN_KEYS, Documents, Example, take
from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import is_negative, is_positive, is_query
from embedtrain.data.sources.values import BadRow, describe_value, list_names, shorten

T = TypeVar("T")

TEXTS_ONLY = RowRequirements()  # a query and a positive: what most losses need


class DocumentLookup(Protocol):
    """Texts of documents by id."""

    def text(self, name: str) -> str | None:
        """The document's title and text; None where there is no such document."""
        ...


@dataclass
class RowLayout(ABC):
    """How rows of one layout are parsed. What optional values the rows have is collected for the report."""

    name: ClassVar[str]
    needs: RowRequirements = TEXTS_ONLY
    # Optional values that are used and names of values that are not: sets in the order of first occurrence.
    features: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Example:
        """The texts of a row, and the values besides them that the loss needs. Raises BadRow if it cannot be used."""
        texts = _drop_repeated_negatives(self._parse(row, documents))
        return self._only_negatives(texts) if self.needs.other_positives and not texts.positives else texts

    def describe(self) -> str:
        """A phrase for the report: the layout and the optional values found in its rows."""
        *first, last = self.features or [""]
        return f"{self.name} with {', '.join(first)}{' and ' if first else ''}{last}" if self.features else self.name

    @abstractmethod
    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example: ...

    def _require_positives(self, positives: Sequence[object], key: str) -> None:
        """Reject a row without positives, which only losses of all documents of a row can use."""
        if not positives and not self.needs.other_positives:
            raise BadRow(f"{key} is empty: a row needs at least one positive")

    def _only_negatives(self, texts: Example) -> Example:
        """A row without positives as a list of documents with scores, which are 0 if it has none."""
        documents = texts.negatives
        if not documents:
            raise BadRow("this row has neither positives nor negatives")
        if not documents.scores and self.needs.scores is ScoreRequirement.pairs:
            documents = replace(documents, scores=(0.0,) * len(documents))
        num_dropped = documents.num_dropped
        return replace(texts, positives=replace(documents, num_dropped=0), negatives=Documents(num_dropped=num_dropped))

    def _ignore_except(self, row: dict[str, Any], *keys: str) -> None:
        for key, value in row.items():
            if key in keys or key in self.ignored:
                continue
            if value is not None and value not in ("", []):
                self._require_no_role(key, value)
            elif is_negative(key) or is_positive(key):  # a later row may have one
                continue
            self.ignored[key] = None

    def _require_no_role(self, name: str, value: object) -> None:
        """Reject a value that is not used although its name can only be that of a positive or of negatives."""
        role = "negatives" if is_negative(name) else "positives" if is_positive(name) else None
        if role is not None and not isinstance(value, bool | int | float):
            raise BadRow(
                f'"{name}" would not be used, and by its name it holds {role}: name the columns, such as '
                "columns=[QUERY,POSITIVE,...], or rename or remove it"
            )


def _drop_repeated_negatives(texts: Example) -> Example:
    """The row without negatives that are positives or repeat another negative, nor their scores, ids and vectors."""
    positives, negatives = texts.positives.texts, texts.negatives.texts
    first_indices: dict[str, int] = {}
    for index, text in enumerate(negatives):
        if text not in positives:
            first_indices.setdefault(text, index)
    if len(first_indices) == len(negatives):
        return texts
    first, num_others = list(first_indices.values()), 1 + len(positives)
    return replace(
        texts,
        negatives=replace(texts.negatives.take(first), num_dropped=len(negatives) - len(first)),
        vectors=(*texts.vectors[:num_others], *take(texts.vectors[num_others:], first)),
    )


def needs_besides_texts(needs: RowRequirements) -> str:
    """What the loss needs besides texts, for messages."""
    if needs.label:
        return "the class of every row"
    if needs.vectors:
        return "a teacher's vectors of every text"
    return (
        "a teacher's score of every document"
        if needs.scores == ScoreRequirement.teacher
        else "a score of every document"
    )


def losses_with_scores() -> str:
    """The values of `loss` that use scores of pairs, for messages."""
    kinds = [kind for kind in LOSSES.values() if kind not in (CombinedConfig, SentenceTransformersConfig)]
    needs = [kind().row_requirements for kind in kinds]
    return ", ".join(need.loss for need in needs if need.scores == ScoreRequirement.pairs)


def require_keys(row: dict[str, Any], *keys: str) -> None:
    """Reject a row that lacks one of these keys."""
    for key in keys:
        if key not in row:
            raise BadRow(f'no "{key}" in this row, which has: {list_names(row)}')


def reject_media(row: dict[str, Any], name: str) -> None:
    """Reject videos and audio: only texts and pictures are trained on."""
    for key, value in row.items():
        # The last word of a key such as query_video decides: `videography` may be a text.
        if value and key.rpartition("_")[2] in ("video", "videos", "audio", "audios"):
            raise BadRow(f'{name} has "{key}": only texts and pictures are trained on')


def lookup_texts(ids: Sequence[str], name: str, documents: DocumentLookup | None) -> tuple[str, ...]:
    """The texts of documents by id. Raises BadRow if the corpus lacks a document, or its text is empty."""
    if documents is None:
        raise BadRow(
            f"{name} names documents by id, and the source's first rows do not: "
            "write data.train=[{path: ..., documents: FILE}], where FILE holds their texts"
        )
    texts = []
    for document_id in ids:
        text = documents.text(document_id)
        if text is None:
            raise BadRow(f'{name} names "{document_id}", and the corpus has no such document')
        if not text.strip():
            raise BadRow(f'{name} names "{document_id}", and that document has no text')
        texts.append(text)
    return tuple(texts)


def id_list(value: object, name: str) -> list[str]:
    """A list of ids; empty for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list of ids, not {describe_value(value)}")
    ids = [values.identifier(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]
    if "" in ids:
        raise BadRow(f"element {ids.index('') + 1} of {name} is empty and must be the id of a document")
    return ids


def passages(value: object, name: str, id_key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and ids of a list of objects with `text` and perhaps `title` and an id; no ids where none has one."""
    if value is None:
        return (), ()
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list of objects with a text, not {describe_value(value)}")
    texts: list[str] = []
    ids: list[str] = []
    for i, element in enumerate(value, 1):
        location = f"element {i} of {name}"
        if not isinstance(element, dict):
            raise BadRow(f"{location} must be an object with a text, not {describe_value(element)}")
        reject_media(element, location)
        texts.append(values.text(element, location))
        ids.append(values.identifier(element.get(id_key), f'"{id_key}" of {location}'))
    return tuple(texts), tuple(ids) if any(ids) else ()


# FlagEmbedding's types of rows whose query and documents are of one kind and get the same instruction.
SYMMETRIC = ("symmetric_sts", "symmetric_clustering")
_FLAG_KEYS = ("query", "pos", "neg", "pos_id", "neg_id", "prompt", "prompt_for_query", "type")
_FLAG_SCORES = ("pos_scores", "neg_scores", "scores")
_KNOWN_KEYS = frozenset((*_FLAG_KEYS, *_FLAG_SCORES))
# Of these keys, one shows that rows are FlagEmbedding's.
OWN_KEYS = frozenset(("pos", "neg", "pos_scores", "neg_scores", "pos_id", "neg_id"))


class FlagEmbedding(RowLayout):
    """Rows `{"query": str, "pos": [str, ...], "neg": [str, ...]}`; `neg` is optional.

    `pos_scores` and `neg_scores` (or `scores`, of the positives and then the negatives) are read where the loss needs
    scores; `pos_id`, `neg_id`, the query's instruction `prompt` (or `prompt_for_query`) and `type` are always read, and
    of rows with `synthetic: true` what they say about the query (ORIGIN_KEYS);
    other keys are ignored, unless their names are those of a query, positives or negatives (`question`, `positive`,
    `hard_negatives`), which are read as such. The query may also be [instruction, text], and then documents may be.

    Sources: https://github.com/FlagOpen/FlagEmbedding/tree/master/examples/finetune/embedder,
    https://github.com/NovaSearch-Team/RAG-Retrieval, https://github.com/ContextualAI/gritlm.
    """

    name = "FlagEmbedding rows"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        if not row.keys() <= _KNOWN_KEYS:
            row = self._with_own_keys(row)
        require_keys(row, "query", "pos")
        instruction, query = values.text_with_instruction(row["query"], '"query"')
        may_have_instructions = instruction is not None
        if may_have_instructions:
            row = _wrap_single_documents(row)
        document_instructions: set[str | None] = set()
        positives = _flag_documents(row["pos"], '"pos"', document_instructions, may_have_instructions)
        self._require_positives(positives, '"pos"')
        negatives: list[str] = []
        if row.get("neg") is not None:
            negatives = _flag_documents(row["neg"], '"neg"', document_instructions, may_have_instructions)
        document_instruction = _single_instruction(document_instructions)
        if instruction is not None or document_instruction is not None:
            self.features["instructions"] = None
        texts = Example(
            query,
            Documents(tuple(positives)),
            Documents(tuple(negatives)),
            instruction=instruction,
            document_instruction=document_instruction,
        )
        texts = self._with_scores(texts, row)
        if len(row) > 2 + ("neg" in row):
            texts = self._with_optional_values(texts, row)
        return texts

    def _with_own_keys(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with the values of other names of a query, positives and negatives under FlagEmbedding's keys."""
        others = {
            key: role
            for key, value in row.items()
            if key not in _KNOWN_KEYS and not isinstance(value, bool | int | float | None) and (role := _role(key))
        }
        if not others:
            return row
        renamed = {key: value for key, value in row.items() if key not in others}
        for key, role in others.items():
            value, before = row[key], renamed.get(role)
            if isinstance(value, dict):
                value = values.objects_in(value)
            if role != "query" and not isinstance(value, list):
                value = [value] if value else []
            if role == "neg" and before is not None:
                value = [*(before if isinstance(before, list) else [before]), *value]
            elif before is not None and before != value:
                raise BadRow(
                    f'"{role}" and "{key}" may each be the {"query" if role == "query" else "positives"}: write the '
                    f"columns to train on, such as columns=[query,pos,neg], or remove one of them"
                )
            renamed[role] = value
            self.features[f"{key} = {role}"] = None
        return renamed

    def _with_optional_values(self, texts: Example, row: dict[str, Any]) -> Example:
        has_scores = self.needs.scores != ScoreRequirement.none
        origin = self._origin(row) if row.get("synthetic") else None
        used = (*_FLAG_KEYS, *(_FLAG_SCORES if has_scores else ()), *(() if origin is None else ORIGIN_KEYS))
        self._ignore_except(row, *used)
        ids: list[tuple[str, ...]] = []
        for key, name, documents in (("pos_id", '"pos"', texts.positives), ("neg_id", '"neg"', texts.negatives)):
            value = row.get(key)
            if value is not None:
                value = values.one_per_text(value, f'"{key}"', name, len(documents), values.identifier)
            ids.append(tuple(value or ()))
        instruction = texts.instruction
        for key in ("prompt", "prompt_for_query"):
            prompt = values.instruction(row.get(key), f'"{key}"')
            if prompt is not None and instruction not in (None, prompt):
                raise BadRow(f'"{key}" is {describe_value(prompt)}, and the row gives its query another instruction')
            instruction = instruction if prompt is None else prompt
        for feature, present in (
            ("scores", texts.positives.scores),
            ("ids", any(ids)),
            ("instructions", instruction is not None),
        ):
            if present:
                self.features[feature] = None
        max_negatives, is_symmetric = self._type(row.get("type"))
        document_instruction = texts.document_instruction
        if is_symmetric and document_instruction is None:
            document_instruction = instruction
            if instruction is None:
                self.ignored[f"type {row['type']} (of rows without a prompt)"] = None
        return replace(
            texts,
            positives=replace(texts.positives, ids=ids[0]),
            negatives=replace(texts.negatives, ids=ids[1]),
            instruction=instruction,
            document_instruction=document_instruction,
            max_negatives=max_negatives,
            origin=origin,
        )

    def _origin(self, row: dict[str, Any]) -> str:
        """What a row of a synthetic query says about it."""
        known = {key: row[key] for key in ORIGIN_KEYS if isinstance(row.get(key), str | int | float)}
        self.features["synthetic queries"] = None
        return json.dumps(known, ensure_ascii=False)

    def _type(self, value: object) -> tuple[int | None, bool]:
        """How many negatives rows of a type use, and whether their documents get the query's instruction."""
        match value:
            case None | "normal" | "symmetric_class":
                return None, False
            case "only_1neg":
                self.features["one negative used (only_1neg)"] = None
                return 1, False
            case str() if value in SYMMETRIC:
                return None, True
            case _:
                self.ignored[f"type {value}"] = None
                return None, False

    def _with_scores(self, texts: Example, row: dict[str, Any]) -> Example:
        if self.needs.scores == ScoreRequirement.none:
            return texts
        num_positives, num_negatives = len(texts.positives), len(texts.negatives)
        of_positives, of_negatives = row.get("pos_scores"), row.get("neg_scores")
        positives_key = "pos_scores"
        if of_positives is None and of_negatives is None and row.get("scores") is not None:
            of_all = row["scores"]
            if isinstance(of_all, list) and len(of_all) != num_positives and num_negatives:
                count = num_positives + num_negatives
                scores = values.one_per_text(of_all, '"scores"', '"pos" and "neg"', count, values.number)
                return _scored(texts, scores[:num_positives], scores[num_positives:])
            of_positives, positives_key = of_all, "scores"
        if self.needs.scores == ScoreRequirement.pairs and of_positives is None and of_negatives is None:
            return texts
        for key, value, count in (
            ("pos_scores", of_positives, num_positives),
            ("neg_scores", of_negatives, num_negatives),
        ):
            if value is None and count:
                needed = needs_besides_texts(self.needs)
                raise BadRow(f'loss={self.needs.loss} needs {needed}, and this row has no "{key}"')
        positive_scores = values.one_per_text(
            of_positives or [], f'"{positives_key}"', '"pos"', num_positives, values.number
        )
        negative_scores = values.one_per_text(of_negatives or [], '"neg_scores"', '"neg"', num_negatives, values.number)
        return _scored(texts, positive_scores, negative_scores)


def _scored(texts: Example, of_positives: Sequence[float], of_negatives: Sequence[float]) -> Example:
    return replace(
        texts,
        positives=replace(texts.positives, scores=tuple(of_positives)),
        negatives=replace(texts.negatives, scores=tuple(of_negatives)),
    )


@cache
def _role(name: str) -> str | None:
    """The key of a column of another name; None for one without a role of its own."""
    return "neg" if is_negative(name) else "pos" if is_positive(name) else "query" if is_query(name) else None


def _flag_documents(value: object, name: str, instructions: set[str | None], may_have_instructions: bool) -> list[str]:
    """A list of texts. The instructions that come with them, where they may, are added to `instructions`."""
    pairs = [i for i, element in enumerate(value, 1) if isinstance(element, list)] if isinstance(value, list) else []
    if pairs and not may_have_instructions:
        raise BadRow(
            f"element {pairs[0]} of {name} is a list inside a list: write texts, or, if these are "
            '[instruction, text], "query" like that too'
        )
    if not isinstance(value, list) or not pairs:
        texts = values.text_list(value, name)
        if texts:
            instructions.add(None)
        return texts
    parsed = [values.text_with_instruction(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]
    instructions.update(instruction for instruction, _ in parsed)
    return [text for _, text in parsed]


def _single_instruction(instructions: set[str | None]) -> str | None:
    if len(instructions) > 1:
        ordered = sorted(instructions, key=lambda instruction: (instruction is None, instruction))
        first, second = ("none" if instruction is None else shorten(instruction) for instruction in ordered[:2])
        raise BadRow(
            f"the documents of this row have different instructions, {first} and {second}: give all of them the same"
        )
    return next(iter(instructions), None)


def _wrap_single_documents(row: dict[str, Any]) -> dict[str, Any]:
    """MEDI's rows, whose only positive and negative are [instruction, text] themselves, as gritlm writes them.

    Two plain texts are two documents, unless positive and negative have the same first element: a positive is never a
    negative.
    """
    positive, negative = row["pos"], row.get("neg")
    if not (values.is_text_pair(positive) and values.is_text_pair(negative)):
        return row
    if positive[0] == negative[0]:
        return {**row, "pos": [positive], "neg": [negative]}
    raise BadRow(
        'the query is [instruction, text], and "pos" and "neg" are two texts each: '
        "put [instruction, text] of a document into brackets once more, or leave the query's instruction out"
    )


class TevatronPassages(RowLayout):
    """Rows `{"query", "positive_passages": [{"docid", "title", "text"}, ...], "negative_passages": [...]}`.

    The text of a document is `title + " " + text`. https://github.com/texttron/tevatron
    """

    name = "Tevatron passages"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        require_keys(row, "query", "positive_passages")
        query = values.text(row["query"], '"query"')
        positives, positive_ids = passages(row["positive_passages"], '"positive_passages"', "docid")
        self._require_positives(positives, '"positive_passages"')
        negatives, negative_ids = passages(row.get("negative_passages"), '"negative_passages"', "docid")
        self._ignore_except(row, "query", "positive_passages", "negative_passages")
        if positive_ids or negative_ids:
            self.features["ids"] = None
        return Example(query, Documents(positives, ids=positive_ids), Documents(negatives, ids=negative_ids))


class TevatronIds(RowLayout):
    """Rows `{"query_text", "positive_document_ids": [...], "negative_document_ids": [...]}` and a corpus.

    The query's key may also be `query`. https://github.com/texttron/tevatron
    """

    name = "Tevatron rows with ids of documents of a corpus"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        reject_media(row, "this row")
        key = "query" if "query_text" not in row and "query" in row else "query_text"
        require_keys(row, key, "positive_document_ids")
        query = values.text(row[key], f'"{key}"')
        positive_ids = id_list(row["positive_document_ids"], '"positive_document_ids"')
        negative_ids = id_list(row.get("negative_document_ids"), '"negative_document_ids"')
        self._require_positives(positive_ids, '"positive_document_ids"')
        present = {name: value for name, value in row.items() if value is not None}
        self._ignore_except(present, key, "positive_document_ids", "negative_document_ids")
        return Example(
            query,
            Documents(lookup_texts(positive_ids, '"positive_document_ids"', documents), ids=tuple(positive_ids)),
            Documents(lookup_texts(negative_ids, '"negative_document_ids"', documents), ids=tuple(negative_ids)),
        )


class NemoRows(RowLayout):
    """Rows `{"question" or "query": str, "pos_doc": ..., "neg_doc": ...}` of NeMo Automodel.

    Documents are a text, a list of texts, objects `{"text", "id"?}`, or objects `{"id"}` of a corpus.
    https://github.com/NVIDIA-NeMo/Automodel
    """

    name = "NeMo rows"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        key = "query" if "query" in row else "question"
        require_keys(row, key, "pos_doc")
        query = values.text(row[key], f'"{key}"')
        positives, positive_ids = _nemo_documents(row["pos_doc"], '"pos_doc"', documents)
        negatives, negative_ids = _nemo_documents(row.get("neg_doc"), '"neg_doc"', documents)
        self._require_positives(positives, '"pos_doc"')
        self._ignore_except(row, key, "pos_doc", "neg_doc")
        if positive_ids or negative_ids:
            self.features["ids"] = None
        return Example(query, Documents(positives, ids=positive_ids), Documents(negatives, ids=negative_ids))


def _nemo_documents(value: Any, name: str, documents: DocumentLookup | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and ids."""
    if value is None:
        return (), ()
    elements = value if isinstance(value, list) else [value]
    if not any(isinstance(element, dict) for element in elements):
        return tuple(values.texts(value, name)), ()
    if all(isinstance(element, dict) and not values.holds_text(element) for element in elements):
        ids = id_list([element.get("id") for element in elements], name)
        return lookup_texts(ids, name, documents), tuple(ids)
    return passages(elements, name, "id")


class MsSwiftMessages(RowLayout):
    """Rows `{"messages": [...], "positive_messages": [[...], ...], "negative_messages": [[...], ...]}` of ms-swift.

    A message is `{"role", "content"}`. A system message at the beginning is an instruction; the contents after it,
    joined by line breaks, are the text. `label` or `score` is the score of a pair. `images`, `positive_images` and
    `negative_images` (a list for each conversation) stand where the texts have `<image>`, else before them.
    https://swift.readthedocs.io/en/latest/BestPractices/Embedding.html
    """

    name = "messages (ms-swift)"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        reject_media(row, "this row")
        require_keys(row, "messages", "positive_messages")
        instruction, query = _parse_conversation(row["messages"], '"messages"', row.get("images"))
        positives = _parse_conversations(row, "positive")
        negatives = _parse_conversations(row, "negative")
        self._require_positives(positives, '"positive_messages"')
        document_instructions = {system for system, _ in (*positives, *negatives)}
        if len(document_instructions) > 1:
            raise BadRow("the documents of this row have different system messages: a row's must be equal")
        document_instruction = next(iter(document_instructions), None)
        names = ("images", "positive_images", "negative_images")
        self._ignore_except(row, "messages", "positive_messages", "negative_messages", "label", "score", *names)
        if instruction is not None or document_instruction is not None:
            self.features["instructions"] = None
        scores = self._scores(row, len(positives), len(negatives))
        return Example(
            query,
            Documents(tuple(text for _, text in positives), tuple(scores[: len(positives)])),
            Documents(tuple(text for _, text in negatives), tuple(scores[len(positives) :])),
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


def _parse_conversations(row: dict[str, Any], role: str) -> list[tuple[str | None, str]]:
    value, name = row.get(f"{role}_messages"), f'"{role}_messages"'
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list of conversations, each a list of messages, not {describe_value(value)}")
    images = row.get(f"{role}_images")
    if images and (not isinstance(images, list) or len(images) != len(value)):
        raise BadRow(f'"{role}_images" must be a list with a list of images for each of the {len(value)} of {name}')
    return [
        _parse_conversation(element, f"element {i} of {name}", images[i - 1] if images else None)
        for i, element in enumerate(value, 1)
    ]


def _parse_conversation(value: object, name: str, images: object = None) -> tuple[str | None, str]:
    """The system message of a conversation, if it has one, and its text with the images."""
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
                check = values.string if images else values.text
                contents.append(check(content, f'"content" of {location}'))
            case role:
                raise BadRow(
                    f"{location} has the role {describe_value(role)}: allowed are user, assistant, and system at the "
                    "beginning"
                )
    if not contents:
        raise BadRow(f"{name} has no message besides the system message")
    pictures = list(values.picture_values(images))
    return instruction, values.text(values.with_pictures("\n".join(contents), pictures, "<image>", name), name)


def _parse_content(value: object, name: str) -> object:
    """A message's content; the texts of a list of parts are joined by line breaks."""
    if not isinstance(value, list) or any(values.picture_values(value)):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{name} holds {describe_value(part)}: only texts and pictures are trained on")
    return "\n".join(part["text"] for part in value)


class BeirQueries(RowLayout):
    """The judged queries of a BEIR folder, as `retrieval.judged_rows` joins them, and its corpus.

    Where the loss needs scores, the scores of the judgements are used.
    """

    name = "BEIR's judged queries, documents above 0 = positives"

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        query = values.text(row["query"], "the query")
        if row["negative_ids"]:
            self.features["others that are judged = hard negatives"] = None
        has_scores = self.needs.scores != ScoreRequirement.none

        def judged(kind: str) -> Documents:
            ids = tuple(row[f"{kind}_ids"])
            scores = tuple(row[f"{kind}_scores"]) if has_scores else ()
            return Documents(lookup_texts(row[f"{kind}_ids"], "the judgement", documents), scores, ids)

        return Example(query, judged("positive"), judged("negative"))

    def describe(self) -> str:
        """The layout, and whether there are hard negatives."""
        return ", ".join([self.name, *self.features])
