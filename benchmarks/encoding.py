"""Encoding documents compared with SentenceTransformer.encode; both times include tokenization."""

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

from benchmarks.inputs import MINILM, load_minilm, precisions, retrieval_set
from benchmarks.measure import interleave, markdown, ratio, require, speed, unit
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.evaluation.types import RetrievalSet
from embedtrain.inference.encode import SentenceEncoder

DOCUMENTS, WARMUP_DOCUMENTS = 500, 32
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
TITLE = f"Encoding {DOCUMENTS} documents, all-MiniLM-L6-v2, against SentenceTransformer.encode"
# Relative to theirs in fp32, its default, for each of our precisions.
MIN_COSINE = {Precision.fp32: 0.9999, Precision.bf16: 0.999}
DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}
# Our precision, and theirs.
COMPARED = ((Precision.bf16, Precision.fp32), (Precision.bf16, Precision.bf16), (Precision.fp32, Precision.fp32))


class Ours:
    """Encodes the documents with embedtrain; round 0 warms up on a few of them."""

    def __init__(self, world: World, precision: Precision, texts: list[str]) -> None:
        model = load_minilm(world, precision)
        self.encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
        self.texts, self.tokens = texts, sum(len(ids) for ids in model.tokenizer.ids(texts))

    def __call__(self, round_number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        return self.encoder.encode_all(self.texts if round_number else self.texts[:WARMUP_DOCUMENTS])


class Theirs:
    """Encodes the documents with sentence-transformers, with weights in `precision`."""

    def __init__(self, world: World, precision: Precision, texts: list[str]) -> None:
        dtype = {"dtype": DTYPES[precision]}
        self.model, self.texts = SentenceTransformer(MINILM, device=str(world.device), model_kwargs=dtype), texts

    def __call__(self, round_number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        texts = self.texts if round_number else self.texts[:WARMUP_DOCUMENTS]
        vectors: Tensor = self.model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
        return vectors.float()


def measure(num_documents: int = DOCUMENTS) -> str:
    with joined_world() as world:
        data = retrieval_set(min(100, num_documents), num_documents).data
        assert isinstance(data, RetrievalSet)
        texts = list(data.documents.texts)
        ours = {precision: Ours(world, precision, texts) for precision in precisions()}
        theirs = {precision: Theirs(world, precision, texts) for precision in precisions()}
        timed = interleave(*ours.values(), *theirs.values())
    our_rounds = dict(zip(ours, timed[: len(ours)], strict=True))
    their_rounds = dict(zip(theirs, timed[len(ours) :], strict=True))
    rows = []
    for our_precision, their_precision in COMPARED:
        if our_precision in ours and their_precision in theirs:
            our_timed, their_timed = our_rounds[our_precision], their_rounds[their_precision]
            vectors = zip(our_timed, their_rounds[Precision.fp32], strict=True)
            cosine = min(float(F.cosine_similarity(a.value, b.value).min()) for a, b in vectors)
            require(cosine >= MIN_COSINE[our_precision], f"encoding: a vector's cosine with theirs in fp32 is {cosine}")
            tokens = [ours[our_precision].tokens] * len(our_timed)
            speeds = [f"{speed(rounds, tokens):,.0f}" for rounds in (our_timed, their_timed)]
            precision_cells = [our_precision.value, their_precision.value]
            rows.append([*precision_cells, *speeds, ratio(our_timed, their_timed), f"{cosine:.6f}"])
    per_s = f"real tokens / {unit()}"
    cosine_header = "min cosine of ours with theirs in fp32"
    return markdown(["ours", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio", cosine_header], rows)
