"""The directory of a late-interaction model, as sentence-transformers 6 and PyLate read it, and its verification.

Of two layouts PyLate's is written, which sentence-transformers opens as well, unless the model has settings that PyLate
does not have: it would ignore them and compute other vectors. The layout of sentence-transformers 6 names modules that
PyLate cannot open.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.config.late_interaction import QueryExpansion, TokenSimilarity
from embedtrain.config.token_vectors import Expansion, TokenVectors
from embedtrain.data.token_rows import TokenRowTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import CheckpointError
from embedtrain.formats.cross_encoder import TRANSFORMER_MODULE, TRANSFORMER_SETTINGS, write_modules
from embedtrain.formats.sentence_transformers import BATCH_SIZE, load_model, opening
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json
from embedtrain.models.late_interaction_files import PYLATE_DENSE
from embedtrain.models.module_settings import MULTI_VECTOR, PYLATE, SETTINGS
from embedtrain.models.tokenizer import resolve_max_length
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

_DENSE = "sentence_transformers.base.modules.dense.Dense"
_MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
_OLD_TRANSFORMER = "sentence_transformers.models.Transformer"  # of PyLate, whose sentence-transformers is older
_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
_PYLATE_MAXSIM = "MaxSim"
# Texts that show which token ids a prompt adds.
_PROBES = ("a", "two words", "What is it?")


def write_late_interaction_settings(directory: Path, source: ModelSource, tokenizer: TokenRowTokenizer) -> None:
    """Write the files with which other libraries compute the same vectors."""
    settings: TokenVectors = source.settings
    words = [word for word in settings.skiplist_words if word not in tokenizer.unknown_words]
    lengths = {"query": tokenizer.limit(TextRole.query), "document": tokenizer.limit(TextRole.document)}
    stored: dict[str, Any] = {"max_seq_length": tokenizer.max_length, "do_lower_case": False}
    top: dict[str, Any] = {"__version__": {}, "default_prompt_name": None}
    keys: dict[str, Any]
    if is_pylate := why_not_pylate(settings, tokenizer.tokenizer) is None:
        kinds, dense, keys = {"": _OLD_TRANSFORMER}, PYLATE_DENSE, {"use_residual": False}
        top |= _pylate_settings(source, tokenizer.tokenizer, lengths, words)
    else:
        kinds, dense, keys = {"": TRANSFORMER_MODULE}, _DENSE, dict(_TOKENS)
        stored |= _transformer_settings(settings, lengths)
        prompts = {"query": "", "document": ""} | source.prompts
        top |= {"model_type": MULTI_VECTOR, "prompts": prompts, "similarity_fn_name": settings.similarity.value}
    for index, head in enumerate(source.dense, start=1):
        folder = f"{index}_Dense"
        kinds[folder] = dense
        sizes = {"in_features": head.num_in, "out_features": head.num_out, "bias": head.bias}
        write_json(directory / folder / "config.json", sizes | {"activation_function": head.activation} | keys)
    if not is_pylate:
        mask, normalize = (
            f"{len(kinds) + offset}_{name}" for offset, name in enumerate(("MultiVectorMask", "Normalize"))
        )
        kinds |= {mask: _MASK, normalize: _NORMALIZE}
        tasks = ["query", "document"] if settings.skiplist_queries else ["document"]
        write_json(directory / mask / "config.json", {"skiplist_words": words, "skiplist_tasks": tasks})
        write_json(directory / normalize / "config.json", _TOKENS)
    write_modules(directory, kinds)
    write_json(directory / TRANSFORMER_SETTINGS, stored)
    write_json(directory / SETTINGS, top)


def why_not_pylate(settings: TokenVectors, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The setting that PyLate does not have; None if it computes the same vectors."""
    expansion = settings.expansion
    if expansion is not None and expansion.strategy is not QueryExpansion.fixed:
        return f"expands queries with the strategy {expansion.strategy.value}"
    default = tokenizer.eos_token if tokenizer.mask_token is None else tokenizer.mask_token
    if expansion is not None and expansion.token not in (None, default):
        return f"expands queries with the token {expansion.token}"
    return "leaves out vectors of queries" if settings.skiplist_queries and settings.skiplist_words else None


def pylate_usage(directory: Path) -> tuple[bool, list[str]]:
    """Whether PyLate opens a directory, and the roles whose prompts it prepends if asked for them by name."""
    settings = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    return settings.get("model_type") == PYLATE, [name for name, text in settings.get("prompts", {}).items() if text]


def _pylate_settings(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, lengths: Mapping[str, int], words: list[str]
) -> dict[str, Any]:
    """PyLate's settings, from which sentence-transformers makes its own.

    PyLate inserts prefixes always, and the other prompts if it is asked for them by name.
    """
    settings: TokenVectors = source.settings
    prefixes = {role: pylate_prefix(tokenizer, source.prompts.get(role, "")) for role in ("query", "document")}
    mean = settings.similarity is TokenSimilarity.meanmaxsim
    return {
        "model_type": PYLATE,
        "prompts": source.prompts | {role: prompt for role, (_, prompt) in prefixes.items()},
        "similarity_fn_name": settings.similarity.value if mean else _PYLATE_MAXSIM,
        **{f"{role}_prefix": prefix for role, (prefix, _) in prefixes.items()},
        **{f"{role}_length": length for role, length in lengths.items()},
        "attend_to_expansion_tokens": settings.expansion is not None and settings.expansion.attend,
        "skiplist_words": words,
        "do_query_expansion": settings.expansion is not None,
    }


def pylate_prefix(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[str, str]:
    """The prefix of PyLate and the prompt after it that give the same ids as a prompt.

    PyLate inserts the id of the prefix after the first token of a text. Without such a token the prefix is empty.
    """
    added = tokenizer.get_added_vocab()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    for token in sorted(filter(prompt.startswith, added), key=len, reverse=True):
        rest = prompt.removeprefix(token)
        for shown in dict.fromkeys(("", rest) if not rest.strip() else (rest,)):
            inserted = [[*ids(shown + text)[:1], added[token], *ids(shown + text)[1:]] for text in _PROBES]
            if inserted == [ids(prompt + text) for text in _PROBES] == [ids(token + shown + t) for t in _PROBES]:
                return token, shown
    return "", prompt


def _transformer_settings(settings: TokenVectors, lengths: Mapping[str, int]) -> dict[str, Any]:
    """What sentence-transformers 6 reads with the Transformer module."""
    expansion: Expansion | None = settings.expansion
    stored = {f"{role}_length": length for role, length in lengths.items()}
    if expansion is None:
        return stored
    values = {"attend": expansion.attend, "token": expansion.token, "length": expansion.length}
    # The length of expanded queries has precedence, and a smaller one beside it is an error.
    stored["query_length"] = max(stored["query_length"], expansion.length)
    return stored | {"query_expansion": {"strategy": expansion.strategy.value} | values}


def probe_token_vectors(
    encoder: Encoder,
    tokenizer: TokenRowTokenizer,
    texts: tuple[str, ...],
    prompts: Mapping[str, str],
    device: torch.device,
) -> Tensor:
    """Vectors [R, D] of the tokens of each text as a query, then as a document; one text per forward pass.

    A collective if the encoder is sharded.
    """
    vectors = []
    for role in (TextRole.query, TextRole.document):
        prompt = prompts.get(role.value, "")
        ids = tokenizer.ids([prompt + text for text in texts], None, prompt, role)
        chunks = (tokenizer.chunk(ids, [row]).to(device) for row in range(len(ids)))
        with torch.no_grad():
            vectors += [encoder(chunk).cpu() for chunk in chunks]
    return torch.cat(vectors)


def token_vectors_of_transformers(
    encoder: Encoder, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]
) -> Tensor:
    """`probe_token_vectors` of an encoder whose backbone and tokenizer transformers has opened."""
    assert source.kind.name == "late_interaction"
    rows = TokenRowTokenizer(tokenizer, resolve_max_length(source, tokenizer), source.settings)
    return probe_token_vectors(encoder.eval(), rows, texts, source.prompts, torch.device("cpu"))


def token_vectors_of_sentence_transformers(directory: Path, source: ModelSource, texts: tuple[str, ...]) -> Tensor:
    """The same by sentence-transformers; CheckpointError if it cannot open the directory, or has another score."""
    assert source.kind.name == "late_interaction"
    with opening(directory):
        model = load_model("MultiVectorEncoder", directory, source)
        queries = model.encode_query(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False)
        documents = model.encode_document(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False)
        similarity = model.similarity_fn_name
    if similarity != source.settings.similarity.value:
        raise CheckpointError(
            f"sentence-transformers opens {directory} with the similarity {similarity}, not "
            f"{source.settings.similarity.value}"
        )
    return torch.cat([torch.as_tensor(vectors).float().cpu() for vectors in (*queries, *documents)])
