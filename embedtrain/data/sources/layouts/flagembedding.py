"""FlagEmbedding's rows, and those of others who write the same keys: RAG-Retrieval, gritlm, E5, MEDI."""

from dataclasses import dataclass, field
from typing import Any, TypeGuard

from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, DocumentLookup, beside, require, with_found
from embedtrain.data.sources.problems import BadRow, shorten, told
from embedtrain.data.types import Texts

# FlagEmbedding's types of rows in which query and document are of one sort and get the same instruction.
SYMMETRIC = ("symmetric_sts", "symmetric_clustering")
_READ = frozenset(("query", "pos", "neg", "pos_id", "neg_id", "prompt", "prompt_for_query", "type"))
_SCORES = ("pos_scores", "neg_scores", "scores")


@dataclass
class FlagEmbedding:
    """Rows `{"query": str, "pos": [str, ...], "neg": [str, ...]}`; `neg` is optional.

    Beside them `pos_scores` and `neg_scores` (or `scores`, of the positives and then the negatives) are read if
    the loss needs scores; `pos_id`, `neg_id`, the query's instruction `prompt` (or `prompt_for_query`) and `type`
    always; other keys are ignored. The query may also be [instruction, text], and then documents may be so too.

    Sources: https://github.com/FlagOpen/FlagEmbedding/tree/master/examples/finetune/embedder,
    https://github.com/NovaSearch-Team/RAG-Retrieval, https://github.com/ContextualAI/gritlm.
    """

    needs: RowRequirements = TEXTS_ONLY
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        require(row, "query", "pos")
        query_instruction, query = values.instructed(row["query"], '"query"')
        if query_instruction is not None:
            row = _nested(row)
        of_documents: set[str | None] = set()
        nested = query_instruction is not None
        positives = _texts(row["pos"], '"pos"', of_documents, nested=nested)
        if not positives:
            raise BadRow('"pos" is empty: a row needs at least one positive')
        negatives = row.get("neg")
        negatives = [] if negatives is None else _texts(negatives, '"neg"', of_documents, nested=nested)
        document_instruction = _the_only(of_documents)
        if query_instruction is not None or document_instruction is not None:
            self.found["instructions"] = None
        if len(row) == 2 + ("neg" in row):
            return values.checked(
                query,
                positives,
                negatives,
                scores=self._scores(row, positives, negatives),
                instruction=query_instruction,
                document_instruction=document_instruction,
            )
        return self._with_more(row, query, positives, negatives, query_instruction, document_instruction)

    def told(self) -> str:
        """See Layout."""
        return with_found("FlagEmbedding rows", self.found)

    def _with_more(
        self,
        row: dict[str, Any],
        query: str,
        positives: list[str],
        negatives: list[str],
        instruction: str | None,
        document_instruction: str | None,
    ) -> Texts:
        scored = self.needs.scores != ScoreRequirement.none
        self.ignored.update((key, None) for key in row if key not in _READ and not (scored and key in _SCORES))
        scores = self._scores(row, positives, negatives)
        ids: list[list[str]] = []
        for key, of, texts in (("pos_id", '"pos"', positives), ("neg_id", '"neg"', negatives)):
            given = row.get(key)
            ids.append([] if given is None else values.one_each(given, f'"{key}"', of, len(texts), values.identifier))
        for key in ("prompt", "prompt_for_query"):
            own = values.instruction(row.get(key), f'"{key}"')
            if own is not None and instruction not in (None, own):
                raise BadRow(f'"{key}" is {told(own)}, and the row gives its query another instruction too')
            instruction = instruction if own is None else own
        for what, is_there in (("scores", scores), ("ids", any(ids)), ("instructions", instruction is not None)):
            if is_there:
                self.found[what] = None
        most, is_symmetric = self._type(row.get("type"))
        if is_symmetric and document_instruction is None:
            document_instruction = instruction
            if instruction is None:
                self.ignored[f"type {row['type']} (of rows without a prompt)"] = None
        return values.checked(
            query,
            positives,
            negatives,
            scores=scores,
            positive_ids=ids[0],
            negative_ids=ids[1],
            instruction=instruction,
            document_instruction=document_instruction,
            most_negatives=most,
        )

    def _type(self, value: object) -> tuple[int | None, bool]:
        """How many negatives rows of a type use, and whether their documents get the query's instruction."""
        match value:
            case None | "normal" | "symmetric_class":
                return None, False
            case "only_1neg":
                self.found["one negative used (only_1neg)"] = None
                return 1, False
            case str() if value in SYMMETRIC:
                return None, True
            case _:
                self.ignored[f"type {value}"] = None
                return None, False

    def _scores(self, row: dict[str, Any], positives: list[str], negatives: list[str]) -> list[float]:
        if self.needs.scores == ScoreRequirement.none:
            return []
        of_positives, of_negatives = row.get("pos_scores"), row.get("neg_scores")
        of_all = row.get("scores")
        if of_all is not None and of_positives is None and of_negatives is None:
            if isinstance(of_all, list) and len(of_all) != len(positives) and len(positives) and negatives:
                count = len(positives) + len(negatives)
                return values.one_each(of_all, '"scores"', '"pos" and "neg"', count, values.number)
            of_positives = of_all
        if self.needs.scores == ScoreRequirement.pairs and of_positives is None and of_negatives is None:
            return []
        for key, given, texts in (("pos_scores", of_positives, positives), ("neg_scores", of_negatives, negatives)):
            if given is None and texts:
                raise BadRow(f'loss={self.needs.loss} needs {beside(self.needs)}, and this row has no "{key}"')
        key = "pos_scores" if of_positives is row.get("pos_scores") else "scores"
        return [
            *values.one_each(of_positives, f'"{key}"', '"pos"', len(positives), values.number),
            *values.one_each(of_negatives or [], '"neg_scores"', '"neg"', len(negatives), values.number),
        ]


def _texts(value: object, what: str, instructions: set[str | None], *, nested: bool) -> list[str]:
    """A list of texts; the instructions that come with them, if they may, are added to `instructions`."""
    lists = [i for i, element in enumerate(value, 1) if isinstance(element, list)] if isinstance(value, list) else []
    if lists and not nested:
        raise BadRow(
            f"element {lists[0]} of {what} is a list inside a list: write texts alone, or, if these are "
            '[instruction, text], "query" like that too'
        )
    if not isinstance(value, list) or not lists:
        found = values.text_list(value, what)
        if found:
            instructions.add(None)
        return found
    pairs = [values.instructed(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]
    instructions.update(instruction for instruction, _ in pairs)
    return [text for _, text in pairs]


def _the_only(instructions: set[str | None]) -> str | None:
    if len(instructions) > 1:
        first, second = ("none" if one is None else shorten(one) for one in _in_order(instructions)[:2])
        raise BadRow(
            f"the documents of this row have different instructions, {first} and {second}: give all of them the same"
        )
    return next(iter(instructions), None)


def _in_order(instructions: set[str | None]) -> list[str | None]:
    return sorted(instructions, key=lambda one: (one is None, one))


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    """MEDI's rows, whose only positive and negative are [instruction, text] themselves, as gritlm writes them.

    Two plain texts are two documents, unless positive and negative begin alike: no positive is a negative.
    """
    positive, negative = row["pos"], row.get("neg")
    if not (_is_pair(positive) and _is_pair(negative)):
        return row
    if positive[0] == negative[0]:
        return {**row, "pos": [positive], "neg": [negative]}
    raise BadRow(
        'the query is [instruction, text], and "pos" and "neg" are two texts each: '
        "put [instruction, text] of a document into brackets once more, or leave the query's instruction out"
    )


def _is_pair(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(element, str) for element in value)
