"""What cannot work about evaluation: sets, how often, how they are searched."""

from collections.abc import Callable, Sequence

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.config.schema import Recipe
from embedtrain.errors import ConfigError

SetRule = tuple[Callable[[EvaluationSet], bool], Callable[[EvaluationSet], str]]

# Each says what stands behind the option's path, such as "evaluation.sets[1].".
SET_RULES: list[SetRule] = [
    (
        lambda s: not s.path,
        lambda s: "path is empty: a BEIR folder, a table, or the id of a Hub data set",
    ),
    (
        lambda s: s.subset is not None and s.subset < 1,
        lambda s: f"subset={s.subset}: at least 1 query or row; null takes all",
    ),
    (
        lambda s: s.subset_documents is not None and s.subset_documents < 1,
        lambda s: f"subset_documents={s.subset_documents}: at least 1 document; null takes all",
    ),
    (
        lambda s: s.query_max_length is not None and s.query_max_length < 3,
        lambda s: f"query_max_length={s.query_max_length} {_NO_ROOM}",
    ),
    (
        lambda s: s.document_max_length is not None and s.document_max_length < 3,
        lambda s: f"document_max_length={s.document_max_length} {_NO_ROOM}",
    ),
    (
        lambda s: s.metrics is not None and not s.metrics,
        lambda s: "metrics=[] measures nothing: name some, such as [ndcg@10], or null for those of its kind",
    ),
    (
        lambda s: s.candidates is not None and s.kind not in (SetKind.auto, SetKind.reranking),
        lambda s: f"candidates={s.candidates} is for kind=reranking, not {s.kind.value}",
    ),
    (
        lambda s: s.train is not None and s.kind not in (SetKind.auto, SetKind.classification),
        lambda s: f"train={s.train} is for kind=classification, not {s.kind.value}",
    ),
    (
        lambda s: s.samples_per_label is not None and s.samples_per_label < 1,
        lambda s: f"samples_per_label={s.samples_per_label}: at least 1 text of each class; null takes all",
    ),
    (
        lambda s: s.experiments < 1,
        lambda s: f"experiments={s.experiments}: at least 1",
    ),
]

_NO_ROOM = "leaves no room for text between special tokens: at least 3"

EVALUATION_RULES: list[tuple[Callable[[Recipe], bool], Callable[[Recipe], str]]] = [
    (
        lambda r: r.evaluation.every < 0,
        lambda r: f"evaluation.every={r.evaluation.every}: a number of steps; 0 evaluates at the end only",
    ),
    (
        lambda r: r.evaluation.chunk_tokens < 1,
        lambda r: f"evaluation.chunk_tokens={r.evaluation.chunk_tokens}: must be above 0",
    ),
    (
        lambda r: r.evaluation.subset is not None and r.evaluation.subset < 1,
        lambda r: f"evaluation.subset={r.evaluation.subset}: at least 1 query or row of each set; null takes all",
    ),
    (
        lambda r: r.evaluation.patience is not None and r.evaluation.patience < 1,
        lambda r: f"evaluation.patience={r.evaluation.patience}: at least 1 evaluation; null never stops early",
    ),
    (
        lambda r: r.evaluation.patience is not None and r.checkpoint.best is None,
        lambda r: (
            f"evaluation.patience={r.evaluation.patience} has nothing to wait for: "
            f"set checkpoint.best to set/metric, such as dev/ndcg@10"
        ),
    ),
    (
        lambda r: r.evaluation.patience is not None and r.evaluation.every == 0,
        lambda r: (
            f"evaluation.patience={r.evaluation.patience} counts evaluations during training: "
            f"set evaluation.every to a number of steps"
        ),
    ),
]


def check_sets(sets: Sequence[EvaluationSet], option: str) -> None:
    """Refuse sets that cannot work.

    Args:
        sets: the elements of a list option.
        option: its path, such as `evaluation.sets`.

    Raises:
        ConfigError: the first rule that is broken, with the element's path.
    """
    for index, one in enumerate(sets):
        for broken, sentence in SET_RULES:
            if broken(one):
                raise ConfigError(f"{option}[{index}].{sentence(one)}")
