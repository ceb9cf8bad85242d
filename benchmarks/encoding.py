"""Encoding documents beside SentenceTransformer.encode, tokenising included on both sides."""

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

from benchmarks.inputs import MINILM, minilm, precisions, retrieval_set
from benchmarks.measure import interleave, markdown, ratio, require, speed, unit
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.evaluation.types import RetrievalSet
from embedtrain.inference.encode import SentenceEncoder

DOCUMENTS, FEW = 500, 32
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
TITLE = f"Encoding {DOCUMENTS} documents, all-MiniLM-L6-v2, against SentenceTransformer.encode"
# With theirs in fp32, which is its default, whatever ours is in.
LEAST_COSINE = {Precision.fp32: 0.9999, Precision.bf16: 0.999}
DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}
# Ours, and theirs that it is held against.
COMPARED = ((Precision.bf16, Precision.fp32), (Precision.bf16, Precision.bf16), (Precision.fp32, Precision.fp32))


class Ours:
    """Encodes the documents; round 0, which warms up, a few of them."""

    def __init__(self, world: World, precision: Precision, texts: list[str]) -> None:
        model = minilm(world, precision)
        self.encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
        self.texts, self.tokens = texts, sum(len(ids) for ids in model.tokenizer.ids(texts))

    def __call__(self, number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        return self.encoder.encode_all(self.texts if number else self.texts[:FEW])


class Theirs:
    """The same by sentence-transformers, its weights in the precision."""

    def __init__(self, world: World, precision: Precision, texts: list[str]) -> None:
        dtype = {"dtype": DTYPES[precision]}
        self.model, self.texts = SentenceTransformer(MINILM, device=str(world.device), model_kwargs=dtype), texts

    def __call__(self, number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        chosen = self.texts if number else self.texts[:FEW]
        vectors: Tensor = self.model.encode(chosen, convert_to_tensor=True, show_progress_bar=False)
        return vectors.float()


def measure(num_documents: int = DOCUMENTS) -> str:
    with joined_world() as world:
        data = retrieval_set(min(100, num_documents), num_documents).data
        assert isinstance(data, RetrievalSet)
        texts = list(data.documents.texts)
        mine = {precision: Ours(world, precision, texts) for precision in precisions()}
        theirs = {precision: Theirs(world, precision, texts) for precision in precisions()}
        timed = interleave(*mine.values(), *theirs.values())
    ours, others = (dict(zip(mine, part, strict=True)) for part in (timed[: len(mine)], timed[len(mine) :]))
    rows = []
    for one, other in COMPARED:
        if one in ours and other in others:
            vectors = zip(ours[one], others[Precision.fp32], strict=True)
            cosine = min(float(F.cosine_similarity(a.value, b.value).min()) for a, b in vectors)
            require(cosine >= LEAST_COSINE[one], f"encoding: a vector's cosine with theirs in fp32 is {cosine}")
            tokens = [mine[one].tokens] * len(ours[one])
            speeds = [f"{speed(side, tokens):,.0f}" for side in (ours[one], others[other])]
            rows.append([one.value, other.value, *speeds, ratio(ours[one], others[other]), f"{cosine:.6f}"])
    per_s = f"real tokens / {unit()}"
    cosine_of = "least cosine of ours with theirs in fp32"
    return markdown(["ours", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio", cosine_of], rows)
