"""Encoding documents beside SentenceTransformer.encode with its defaults."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

from benchmarks.inputs import MINILM, minilm, precisions, retrieval_set
from benchmarks.measure import interleave, markdown, require, speeds, unit
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.schema import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.evaluation.encode import SentenceEncoder

DOCUMENTS = 500
# The default of evaluation.chunk_tokens, and one whose activations stay nearer to a CPU's caches.
CHUNK_TOKENS = (EvaluationConfig().chunk_tokens,)
TITLE = f"Encoding {DOCUMENTS} documents, all-MiniLM-L6-v2, against SentenceTransformer.encode"
LEAST_COSINE = {Precision.fp32: 0.9999, Precision.bf16: 0.999}


def measure() -> str:
    with joined_world() as world:
        rows = [row for precision in precisions() for row in _rows(world, precision)]
    per_s = f"real tokens / {unit()}"
    return markdown(["chunk_tokens", "precision", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "least cosine"], rows)


def _rows(world: World, precision: Precision) -> list[list[object]]:
    texts = list(retrieval_set(100, DOCUMENTS).data.documents.texts)
    model = minilm(world, precision)
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    reference = SentenceTransformer(MINILM, device=str(world.device), model_kwargs={"dtype": dtype})
    tokens = sum(len(ids) for ids in model.tokenizer.ids(texts))

    def our_call(chunk_tokens: int) -> Callable[[int], Tensor]:
        encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=chunk_tokens)
        return lambda number: encoder.encode_all(texts[: DOCUMENTS if number else 32])

    def their_call(number: int) -> Tensor:
        chosen = texts[: DOCUMENTS if number else 32]
        return reference.encode(chosen, convert_to_tensor=True, show_progress_bar=False).float()

    theirs, *ours = interleave(their_call, *map(our_call, CHUNK_TOKENS))
    rows: list[list[object]] = []
    for chunk_tokens, timed in zip(CHUNK_TOKENS, ours, strict=True):
        cosine = min(float(F.cosine_similarity(a.value, b.value).min()) for a, b in zip(timed, theirs, strict=True))
        require(cosine >= LEAST_COSINE[precision], f"encoding: a vector's cosine with theirs is {cosine}")
        rows.append([chunk_tokens, precision.value, *speeds(timed, theirs, [tokens] * len(timed)), f"{cosine:.6f}"])
    return rows
