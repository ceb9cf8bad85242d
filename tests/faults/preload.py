"""Imports of a rank, done once: ranks are forked from a process that has them, and start within a second."""

import transformers.models.xlm_roberta.modeling_xlm_roberta
import transformers.models.xlm_roberta.tokenization_xlm_roberta  # noqa: F401

import tests.faults.process  # noqa: F401
