"""Options of `python -m embedtrain.mine`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embedtrain.config.evaluation import Gather, IndexConfig
from embedtrain.config.schema import DataConfig, Pooling, Precision


class Sampling(str, Enum):
    """Which of the documents that qualify become negatives: the best, or any, drawn by the seed."""

    top = "top"
    random = "random"


class AgainstPositive(str, Enum):
    """The positive whose score margins are taken from, where a question has several, in one row or in many."""

    lowest = "lowest"
    highest = "highest"


@dataclass(kw_only=True)
class MineOptions:
    """Options of `python -m embedtrain.mine`."""

    adapter: str | None = None  # a LoRA adapter on the model, as PEFT writes them: directory or Hub id
    model: str = ""  # model directory or Hub id
    data: Any = None  # list of TrainSource, or of paths; or one path
    # More documents to find negatives in, one path or a list: BEIR folders, corpus files, tables, Hub ids, which
    # ID@REVISION pins.
    corpus: Any = None
    to: str = ""  # folder for the mined rows: a file for each source, and summary.json

    negatives: int = 15  # of each row at most, those that it keeps among them
    rank_min: int = 0  # so many of the best documents that qualify are passed over
    rank_max: int = 100  # so many of the best documents that may be negatives are looked at
    relative_margin: float | None = 0.05  # at most (1 - this) of the positive's score: the positive-aware 95 % rule
    absolute_margin: float | None = None  # at most the positive's score less this
    max_score: float | None = None  # of a negative; the teacher's score, where there is a teacher
    min_score: float | None = None  # of a negative; the teacher's score, where there is a teacher
    against: AgainstPositive = AgainstPositive.highest
    sampling: Sampling = Sampling.top
    seed: int = 42  # which negatives `sampling=random` draws
    keep_own_negatives: bool = False  # negatives that rows have stay, before those found; but positives are left out

    # Bi-encoder or cross-encoder whose scores are written, and margins and ranks of negatives taken by.
    teacher: str | None = None
    teacher_revision: str | None = None  # a commit, tag or branch of its Hub repository
    # Pairs a cross-encoder scores at a time. Where memory ran out, mining goes on with fewer, as with another
    # `chunk_tokens`, `gather` or `index.place`: only the last bits of scores may differ.
    teacher_batch_size: int = 32
    teacher_max_length: int | None = None  # tokens; default: the teacher's
    scores: bool = True  # write pos_scores and neg_scores

    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalise vectors; default: as the model says
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    instruction_format: str = DataConfig.instruction_format  # as data.instruction_format
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust
    precision: Precision | None = None  # default: bf16 on GPUs, fp32 on CPUs
    chunk_tokens: int = 16384  # of a forward pass, padding included
    gather: Gather = Gather.block
    index: IndexConfig = field(default_factory=IndexConfig)
    queries_at_a_time: int = 4096  # rows mined, and written, between two places to resume from
    cache_dir: str | None = None  # as data.cache_dir
    timeout: float = 1800.0  # seconds a rank waits for the others, and for rank 0 to collect the documents
