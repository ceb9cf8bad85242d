"""What an evaluation set is once it is read: RetrievalSet, ScoredPairs, LoadedSet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    """Queries, documents, and which documents answer which query.

    Attributes:
        name: what figures are reported under.
        queries: texts by query id, in the order of the file.
        documents: texts by document id, in the order of the file; title and text are one text.
        judgements: by query id the gain of each judged document; only ids that `queries` holds. Documents
            that `documents` does not hold stay: they are relevant and can never be found, as in trec_eval.
    """

    name: str
    queries: dict[str, str]
    documents: dict[str, str]
    judgements: dict[str, dict[str, int]]

    @property
    def judged_queries(self) -> list[str]:
        """Ids of the queries that are measured, in the order of the file."""
        return [query for query in self.queries if query in self.judgements]


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs of sentences with a gold similarity each (semantic textual similarity); lists of equal length."""

    name: str
    first: list[str]
    second: list[str]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """A set with what its recipe entry says about it.

    Attributes:
        data: the set itself.
        query_prompt: put before queries and before both sentences of a pair; None: the model's.
        document_prompt: put before documents; None: the model's.
        notes: one line each, what was found odd and what was done about it.
    """

    data: RetrievalSet | ScoredPairs
    query_prompt: str | None = None
    document_prompt: str | None = None
    notes: tuple[str, ...] = ()
