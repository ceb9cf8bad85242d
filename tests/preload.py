"""Imports that processes of tests share: see tests/forked.py."""

import gc

import peft  # noqa: F401
import sentence_transformers  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.models.xlm_roberta.modeling_xlm_roberta  # noqa: F401

import embedtrain.commands.verify.clients
import embedtrain.training.train  # noqa: F401  (commands import it when they run)
import tests.faults.process  # noqa: F401

# A collection in a process that is forked from this one takes half a second otherwise: it visits every object of the
# libraries, and thereby copies their pages.
gc.collect()
gc.freeze()
