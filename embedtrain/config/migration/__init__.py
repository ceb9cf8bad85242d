"""The options, arguments and loss classes of other libraries, and what embedtrain has instead.

Messages about unknown names are made from these tables (`config/names.py`), and `docs/hooks/reference.py` writes them
into the pages for migrating users, docs/from-*.md.
"""

from embedtrain.config.migration.commands import ANY_COMMAND, COMMANDS
from embedtrain.config.migration.libraries import FLAGEMBEDDING, SENTENCE_TRANSFORMERS, TEVATRON
from embedtrain.config.migration.losses import EVALUATORS, LOSS_ARGUMENTS, LOSSES, RERANKER_LOSSES
from embedtrain.config.migration.trainer import LAUNCHERS, TRAINER

__all__ = [
    "ANY_COMMAND",
    "COMMANDS",
    "EVALUATORS",
    "FLAGEMBEDDING",
    "LAUNCHERS",
    "LOSSES",
    "LOSS_ARGUMENTS",
    "RERANKER_LOSSES",
    "SENTENCE_TRANSFORMERS",
    "TEVATRON",
    "TRAINER",
]
