"""The parts of a model card that depend on the kind of model: description, tags, and usage."""

from collections.abc import Mapping
from pathlib import Path

from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.formats.cross_encoder import renders_pairs
from embedtrain.formats.late_interaction import pylate_usage
from embedtrain.formats.sparse import usage_of_words
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import SETTINGS

# What the card calls a model.
_KINDS = {
    "dense": "A text-embedding model with {dimension} dimensions for texts of up to {max_length} tokens",
    "cross_encoder": (
        "A reranker: a cross-encoder that scores pairs of a query and a document of up to {max_length} tokens together"
    ),
    "late_interaction": (
        "A late-interaction model (ColBERT): a vector of {dimension} dimensions for each token of a text of up to "
        "{max_length} tokens, and the sum of the largest similarities of a query's tokens as score"
    ),
    "m3": (
        "A model of three representations of a text of up to {max_length} tokens, in the manner of BGE-M3: a vector of "
        "{dimension} dimensions, a weight of each token, and a vector of each token"
    ),
    "sparse": (
        "A learned sparse model (SPLADE): weights of the {dimension} words of a vocabulary, most of them 0, for texts "
        "of up to {max_length} tokens"
    ),
}
TAGS = {
    "dense": ["sentence-similarity", "feature-extraction"],
    "cross_encoder": ["cross-encoder", "reranker"],
    "sparse": ["sparse-encoder", "splade", "sparse", "feature-extraction"],
    "late_interaction": ["multi-vector", "ColBERT", "late-interaction", "feature-extraction"],
    "m3": ["sentence-similarity", "feature-extraction", "multi-vector", "sparse", "bge-m3"],
}
_PIPELINES = {"dense": "sentence-similarity", "cross_encoder": "text-ranking"}
LOGIT_SCORE_USAGE = [
    "`logit_score` is the same model as a causal language model, whose score is the logit of a token, or the "
    "difference of two, for sentence-transformers 6 (`LogitScore`).",
    "",
]
_MAX_PROMPT = 60  # characters in the table of prompts


def describe_model(kind: str, *, dimension: int, max_length: int) -> str:
    """What the card calls a model, without a full stop."""
    return _KINDS[kind].format(dimension=dimension, max_length=max_length)


def pipeline_tag(kind: str) -> str:
    """The task of the Hub."""
    return _PIPELINES.get(kind, "feature-extraction")


def usage(kind: str, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
    """How libraries open the model `name` and compute its outputs; `architecture` has its files."""
    by_kind = {
        "cross_encoder": _usage_of_scores,
        "late_interaction": _usage_of_token_vectors,
        "m3": _usage_of_m3,
        "sparse": usage_of_words,
    }
    return by_kind.get(kind, _usage_of_vectors)(name, prompts, architecture)


_SIMILARITIES = {
    VectorSimilarity.cosine: "cosine similarity",
    VectorSimilarity.dot: "inner product (`dot`)",
    VectorSimilarity.euclidean: "Euclidean distance",
    VectorSimilarity.manhattan: "Manhattan distance",
}

# What the outputs of the ONNX graph are, by the kind of model.
_GRAPHS = {
    "dense": (
        "from token ids to `last_hidden_state` and, unless a prompt is left out of pooling, `sentence_embedding`, the "
        "vectors with everything applied"
    ),
    "cross_encoder": "from the tokens of pairs to `logits`, the scores before the activation",
    "late_interaction": (
        "from token ids to `last_hidden_state` and `token_embeddings`, the normalised vectors of all tokens: clients "
        "add the tokens that expand queries, and leave out padding and the words of the skip list"
    ),
    "sparse": "from token ids to `logits` and `sentence_embedding`, the weights of words",
    "m3": (
        "from token ids to `last_hidden_state`, `dense_vecs` (also named `sentence_embedding`), `sparse_vecs`, the "
        "lexical weight of each token, and `colbert_vecs`, the vectors of all tokens but the first"
    ),
}


def graph_usage(kind: str) -> list[str]:
    """The paragraph about the ONNX graph."""
    return [
        f"`onnx/model.onnx` is the same model in fp32, {_GRAPHS[kind]}, for onnxruntime, or for sentence-transformers "
        'and optimum with `backend="onnx"`. If the folder `openvino` exists, it is that of `backend="openvino"`.',
        "",
    ]


def _usage_of_scores(name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
    texts = [f"{kind} with {_code(text)}" for kind, text in prompts.items() if text]
    rest = "the library does not prepend it."
    note = f"Begin every {', and every '.join(texts)}: {rest}" if texts else ""
    if renders_pairs(architecture):
        note = (
            "sentence-transformers 6 formats pairs with `chat_template.jinja`; its argument `prompt` is an instruction "
            "for the query. The scores of other software, and of older versions, are only right for texts that are "
            "formatted as the template does."
        )
    return [
        *_python(
            "from sentence_transformers import CrossEncoder",
            "",
            f'model = CrossEncoder("{name}")',
            'scores = model.predict([("a question", "a text that answers it"), ("a question", "another text")])',
            'ranking = model.rank("a question", ["a text that answers it", "another text"])',
        ),
        *([note, ""] if note else []),
    ]


def _usage_of_m3(name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
    return [
        "sentence-transformers computes the vector of a text, FlagEmbedding all three representations:",
        "",
        *_usage_of_vectors(name, prompts, architecture),
        *_python(
            "from FlagEmbedding import BGEM3FlagModel",
            "",
            f'model = BGEM3FlagModel("{name}")',
            'model.encode(["a text"], return_dense=True, return_sparse=True, return_colbert_vecs=True)',
        ),
    ]


def _usage_of_token_vectors(name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
    lines = _similarities("MultiVectorEncoder", name, '["a text that answers it", "another text"]')
    opens, by_name = pylate_usage(architecture)
    if not opens:
        return [*lines, "PyLate cannot open this model, because it has settings that PyLate does not have.", ""]
    query, document = (f', prompt_name="{role}"' if role in by_name else "" for role in ("query", "document"))
    return [
        *lines,
        "With PyLate:",
        "",
        *_python(
            "from pylate import models, rank",
            "",
            f'model = models.ColBERT("{name}")',
            f'queries = model.encode(["a question"], is_query=True{query})',
            f'documents = model.encode([["a text that answers it", "another text"]], is_query=False{document})',
            'print(rank.rerank(documents_ids=[["1", "2"]], queries_embeddings=queries, '
            "documents_embeddings=documents))",
        ),
    ]


def _usage_of_vectors(name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
    similarity = VectorSimilarity(read_json(architecture / SETTINGS)["similarity_fn_name"])
    lines = [
        *_similarities("SentenceTransformer", name, '["a text that answers it"]'),
        f"The model compares vectors by {_SIMILARITIES[similarity]}.",
        "",
    ]
    if any(prompts.values()):
        lines += [
            "`encode_query` and `encode_document` prepend the prompts that the model was trained with. Other software "
            "must prepend them too:",
            "",
            "| texts | prompt |",
            "| --- | --- |",
            *(f"| {kind} | {_code(text)} |" for kind, text in prompts.items() if text),
            "",
        ]
    return lines


def _similarities(class_name: str, name: str, documents: str) -> list[str]:
    """How a class of sentence-transformers compares a question with these documents."""
    return _python(
        f"from sentence_transformers import {class_name}",
        "",
        f'model = {class_name}("{name}")',
        'queries = model.encode_query(["a question"])',
        f"documents = model.encode_document({documents})",
        "print(model.similarity(queries, documents))",
    )


def _python(*lines: str) -> list[str]:
    """A block of code, and the empty line after it."""
    return ["```python", *lines, "```", ""]


def _code(prompt: str) -> str:
    shown = prompt if len(prompt) <= _MAX_PROMPT else f"{prompt[:_MAX_PROMPT]}..."
    return "`` " + repr(shown).replace("|", "\\|") + " ``"
