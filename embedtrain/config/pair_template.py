"""The text around the query and the document of a pair, as decoders that score pairs were trained to read it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embedtrain.config.validation import OptionChecks


class ScoreHead(str, Enum):
    """How a cross-encoder's score is computed from the last layer.

    `classification` is the head of transformers' class for sequence classification. `tokens` is the logit of a token
    after the pair, or the difference of two; the same head starts from their rows of the vocabulary. `auto` is `tokens`
    for a `LogitScore` directory of sentence-transformers, with `score_tokens`, and for a causal language model with a
    named `pair_template`.
    """

    auto = "auto"
    classification = "classification"
    tokens = "tokens"


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """A pair's tokens: prefix, query, between, document, suffix.

    Each text of `prefix`, `between` and `suffix` is tokenized on its own. What `query` and `document` put before and
    after a text, and its prompt, are tokenized with the text: Qwen's tokenizer joins a question mark and the line break
    after it. Only the document is cut, or a query that leaves no room for it.
    """

    prefix: tuple[str, ...] = ()
    query: tuple[str, str] = ("", "")
    between: tuple[str, ...] = ()
    document: tuple[str, str] = ("", "")
    suffix: tuple[str, ...] = ()
    special_tokens: bool = True  # whether the tokenizer's own special tokens begin and end the pair
    bos: bool = False  # whether its bos token begins the pair, if it has one; without `special_tokens`
    max_query_fraction: float = 1.0  # of the tokens besides those of prefix and suffix
    # Prompts of queries and documents; `{instruction}` in the format of the query's is the instruction of a row.
    prompts: Mapping[str, str] = field(default_factory=dict)
    instruction_format: str | None = None

    @property
    def wraps_texts(self) -> bool:
        """Whether text is tokenized together with queries or documents, besides prompts."""
        return any((*self.query, *self.document))


PLAIN_INSTRUCTION = "{instruction}{text}"  # of a chat template whose system message is the whole prompt
_CHAT_END = "<|im_end|>\n<|im_start|>assistant\n"
# Qwen3-Reranker: its model card. bge-reranker-v2-gemma: FlagEmbedding 1.4, inference/reranker/decoder_only/base.py.
# mxbai-rerank-base-v2 and -large-v2: mxbai-rerank 0.1, mxbai_rerank_v2.py.
PAIR_TEMPLATES = {
    "qwen3": PairTemplate(
        prefix=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        ),
        query=("", "\n"),
        suffix=(f"{_CHAT_END}<think>\n\n</think>\n\n",),
        special_tokens=False,
        prompts={
            "query": "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: ",
            "document": "<Document>: ",
        },
        instruction_format="<Instruct>: {instruction}\n<Query>: {text}",
    ),
    "gemma": PairTemplate(
        between=("\n",),
        suffix=(
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        special_tokens=False,
        bos=True,
        max_query_fraction=0.75,
        prompts={"query": "A: ", "document": "B: "},
    ),
    "mxbai": PairTemplate(
        prefix=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n",
        ),
        between=("\n",),
        suffix=(
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            _CHAT_END,
        ),
        special_tokens=False,
        max_query_fraction=0.75,
        prompts={"query": "query: ", "document": "document: "},
        instruction_format="instruction: {instruction}\nquery: {text}",
    ),
}
# The tokens whose logits are the score: that of the first, minus that of the second if there is one.
SCORE_TOKENS = {"qwen3": ("yes", "no"), "gemma": ("Yes",), "mxbai": ("1", "0")}
TEMPLATE_PARTS = ("prefix", "query", "document", "suffix")
_NAMES = {"qwen3": r"qwen3-reranker-", "gemma": r"bge-reranker-v2-gemma", "mxbai": r"mxbai-rerank-(base|large)-v2"}


def pair_template(value: Any) -> PairTemplate | None:
    """The template of a valid `model.pair_template`: a name, a mapping, or None."""
    if value is None:
        return None
    if isinstance(value, str):
        return PAIR_TEMPLATES[value]
    (before_query, after_query), (before_document, after_document) = (
        value[name].split(f"{{{name}}}") for name in ("query", "document")
    )
    return PairTemplate(
        prefix=(value["prefix"],) if value.get("prefix") else (),
        query=(before_query, after_query),
        document=(before_document, after_document),
        suffix=(value["suffix"],) if value.get("suffix") else (),
    )


def published_template(path: str) -> str | None:
    """The name of the template of a published reranker, by its Hub id, a copy of its name, or the Hub's cache."""
    for part in re.split(r"[\\/]+|--", path.lower()):
        for name, pattern in _NAMES.items():
            if re.match(pattern, part):
                return name
    return None


def check_score_labels(labels: Sequence[int], check: OptionChecks, name: str) -> None:
    """Labels are one or two different ones."""
    check.require(
        len(labels) in (1, 2) and len(set(labels)) == len(labels) and min(labels) >= 0,
        name,
        "must be two different labels, such as [1,0] for the logit of label 1 minus that of label 0, or one for its "
        "logit alone",
    )
