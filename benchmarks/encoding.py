"""Encoding documents compared with SentenceTransformer.encode; both times include tokenization."""

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

from benchmarks.inputs import MINILM, load_minilm, precisions, retrieval_set
from benchmarks.measure import markdown, ratio, require, speed, unit
from benchmarks.products import LIMIT_HEADER, limit_cells, measure_shares
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.evaluation.types import RetrievalSet
from embedtrain.inference.encode import SentenceEncoder

DOCUMENTS = 500
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
TITLE = f"Encoding {DOCUMENTS} documents, all-MiniLM-L6-v2, against SentenceTransformer.encode"
# Relative to theirs in fp32, its default, for each of our precisions.
MIN_COSINE = {Precision.fp32: 0.9999, Precision.bf16: 0.999}
DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}
# Our precision, and theirs.
COMPARED = ((Precision.bf16, Precision.fp32), (Precision.bf16, Precision.bf16), (Precision.fp32, Precision.fp32))


class Ours:
    """Encodes the documents with embedtrain."""

    def __init__(self, world: World, precision: Precision, texts: list[str]) -> None:
        model = load_minilm(world, precision)
        self.encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
        self.texts, self.tokens = texts, sum(len(ids) for ids in model.tokenizer.ids(texts))

    def __call__(self, _round_number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        return self.encoder.encode_all(self.texts)


class Theirs:
    """Encodes the documents with sentence-transformers, with weights in `precision`."""

    def __init__(self, world: World, precision: Precision, texts: list[str]) -> None:
        dtype = {"dtype": DTYPES[precision]}
        self.model, self.texts = SentenceTransformer(MINILM, device=str(world.device), model_kwargs=dtype), texts

    def __call__(self, _round_number: int) -> Tensor:
        """Vectors, float32 [n, D]."""
        vectors: Tensor = self.model.encode(self.texts, convert_to_tensor=True, show_progress_bar=False)
        return vectors.float()


def measure(num_documents: int = DOCUMENTS) -> str:
    with joined_world() as world:
        data = retrieval_set(min(100, num_documents), num_documents).data
        assert isinstance(data, RetrievalSet)
        texts = list(data.documents.texts)
        ours = {precision: Ours(world, precision, texts) for precision in precisions()}
        theirs = {precision: Theirs(world, precision, texts) for precision in precisions()}
        measured = measure_shares(*ours.values(), *theirs.values())
    all_ours = dict(zip(ours, measured[: len(ours)], strict=True))
    all_theirs = dict(zip(theirs, measured[len(ours) :], strict=True))
    rows = []
    for our_precision, their_precision in COMPARED:
        if our_precision in ours and their_precision in theirs:
            our, their = all_ours[our_precision], all_theirs[their_precision]
            vectors = zip(our.rounds, all_theirs[Precision.fp32].rounds, strict=True)
            cosine = min(float(F.cosine_similarity(a.value, b.value).min()) for a, b in vectors)
            require(cosine >= MIN_COSINE[our_precision], f"encoding: a vector's cosine with theirs in fp32 is {cosine}")
            tokens = [ours[our_precision].tokens] * len(our.rounds)
            speeds = [f"{speed(side.rounds, tokens):,.0f}" for side in (our, their)]
            cells = [our_precision.value, their_precision.value, *speeds, ratio(our.rounds, their.rounds)]
            rows.append([*cells, f"{cosine:.6f}", *limit_cells(our, their)])
    header = ["ours", "theirs", *(f"{side}, real tokens / {unit()}" for side in ("ours", "theirs")), "ratio"]
    return markdown([*header, "min cosine of ours with theirs in fp32", *LIMIT_HEADER], rows)
