"""The end-of-text token behind every text: exactly once, whatever is cut off, and in the exported tokenizer as well.

It is put into the tokenizer's own post-processor, which is what leaves room for it when a text is cut and what
`tokenizer.json` keeps; read on tokenizers 0.22 and transformers 5.23, which builds tokenizers of all kinds from it.
"""

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from embedtrain.errors import ConfigError

_PROBES = ("a", "two words", "")
_LENGTH = 64


def append_end(tokenizer: PreTrainedTokenizerBase, asked: bool | None, where: str, *, by_default: bool) -> None:
    """Let the tokenizer end texts with its end-of-text token, in place, if it is to and does not do so yet.

    Args:
        tokenizer: as it was read.
        asked: `model.append_eos`; None leaves a tokenizer alone that ends texts with any special token.
        where: it was read from.
        by_default: whether it is to where nothing is asked.

    Raises:
        ConfigError: it has no such token, cannot be told to add it, or adds it and is not to.
    """
    if asked is None and not by_default:
        return
    end, last = tokenizer.eos_token_id, _last_of_all(tokenizer)
    if asked is False:
        if last is not None and last == end:
            raise ConfigError(
                f"model.append_eos=false: the tokenizer of {where} ends every text with {tokenizer.eos_token} itself, "
                "and nothing is taken away from a tokenizer here; leave it out (null)"
            )
        return
    if end is None:
        if asked is None:
            return
        raise ConfigError(
            f"model.append_eos=true: the tokenizer of {where} has no end-of-text token; name one of its tokens as "
            "eos_token in its tokenizer_config.json, or leave append_eos out (null)"
        )
    if last == end or (asked is None and last is not None):
        return
    wanted = [[*_ids(tokenizer, text), end] for text in _PROBES]
    changed = _add(tokenizer, str(tokenizer.eos_token), int(end))
    if not changed or [_ids(tokenizer, text) for text in _PROBES] != wanted:
        raise ConfigError(
            f"the tokenizer of {where} ({type(tokenizer).__name__}) cannot be told to end texts with "
            f"{tokenizer.eos_token}: write model.append_eos=false to train without, or give it a tokenizer.json that "
            "does so"
        )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=_LENGTH)["input_ids"]
    return ids


def _last_of_all(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends every text; None where there is none."""
    ends = {tuple(_ids(tokenizer, text)[-1:]) for text in _PROBES[:2]}
    found = next(iter(ends)) if len(ends) == 1 else ()
    return found[0] if found and found[0] in tokenizer.all_special_ids else None


def _add(tokenizer: PreTrainedTokenizerBase, token: str, number: int) -> bool:
    """Whether its rules have been changed."""
    try:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # a slow one has none, and parts in Python cannot be told as JSON
        return False
    rules["post_processor"] = _with_end(rules["post_processor"], token, number)
    changed = Tokenizer.from_str(json.dumps(rules))
    tokenizer.backend_tokenizer.post_processor = changed.post_processor
    return True


def _with_end(processor: dict[str, Any] | None, token: str, number: int) -> dict[str, Any]:
    """A post-processor that does the same and adds the token at the end."""
    if processor is None:
        return _alone(token, number)
    if _is_template(processor):
        special = processor["special_tokens"] | {token: {"id": token, "ids": [number], "tokens": [token]}}
        single, pair = (
            [*pieces, {"SpecialToken": {"id": token, "type_id": _last_type(pieces)}}]
            for pieces in (processor["single"], processor["pair"])
        )
        return processor | {"single": single, "pair": pair, "special_tokens": special}
    parts = processor["processors"] if processor["type"] == "Sequence" else [processor]
    # Of two templates in a row the second takes what the first has added for texts of their own.
    if any(map(_is_template, parts)):
        parts = [_with_end(part, token, number) if _is_template(part) else part for part in parts]
    else:
        parts = [*parts, _alone(token, number)]
    return {"type": "Sequence", "processors": parts}


def _is_template(processor: dict[str, Any]) -> bool:
    return bool(processor["type"] == "TemplateProcessing")


def _last_type(pieces: list[dict[str, Any]]) -> int:
    return int(next(iter(pieces[-1].values()))["type_id"])


def _alone(token: str, number: int) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    nothing = {"type": "TemplateProcessing", "special_tokens": {}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return _with_end({**nothing, "single": single, "pair": pair}, token, number)
