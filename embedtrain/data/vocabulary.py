"""A tokenizer trained on the training texts, for a model made from scratch: Unigram pieces with byte fallback."""

import json
import random
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from embedtrain.errors import ConfigError, DataError

# In XLM-R's order: ids 0 to 3, and <mask> last.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
MASK = "<mask>"
UNKNOWN = "<unk>"
ROLES = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": UNKNOWN,
    "mask_token": MASK,
}
# Characters never seen become their UTF-8 bytes rather than <unk>, so that two rare characters (Chinese
# names, above all) remain two things to the model. 256 pieces of the vocabulary are their price.
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# A piece that no text should match by chance: far below what any sum of a word's pieces reaches.
NEVER_MATCHED = -1e4
# Characters of scripts that put no blank between words.
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}ー]"
# Unigram, as XLM-R: on one core 5 s for 31,000 texts of 3.9 million characters and 16,000 pieces, so BPE's
# 2 s are no reason to leave it.
# Beyond this many texts more of them hardly change a vocabulary, only the time: a random part is used.
MAX_TEXTS = 50_000
MAX_CHARACTERS_PER_TEXT = 2_000


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, *, lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """Train a tokenizer like XLM-R's on `texts`: `<s> text </s>`, padded on the right.

    Text is normalised (NFKC, runs of whitespace as one blank). A word, a run of Chinese characters, a digit
    and any other sign are cut apart before pieces are learnt, so that a Latin word has the same pieces after
    a blank, a bracket and a Chinese character.

    Two trainings on the same texts may differ in a few pieces (the trainer adds in the order of a hash
    table), so one rank trains and the others load what it saved.

    Args:
        texts: queries and documents.
        vocab_size: tokens wanted, special tokens and bytes included; few texts give fewer.
        max_length: tokens of a text, special tokens included; the tokenizer's `model_max_length`.
        lowercase: fold capital letters. XLM-R does not, but a small vocabulary learnt from few texts loses by
            keeping them apart: BM25 over the tokens finds 0.876 with and 0.845 without (nDCG@10, Debian packages).

    Raises:
        DataError: there are no texts.
        ConfigError: `vocab_size` leaves no room for pieces.
    """
    reserved = len(SPECIAL_TOKENS) + len(BYTES) + 1
    if vocab_size < reserved + 100:
        raise ConfigError(f"model.vocab_size={vocab_size} must be at least {reserved + 100}: {reserved} are reserved")
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = _normalizer(lowercase)
    sample = [tokenizer.normalizer.normalize_str(text) for text in _sample(texts)]
    if not any(sample):
        raise DataError("a vocabulary cannot be trained: there are no training texts")
    sample = _without_rare_characters(sample, most=(vocab_size - reserved) // 2)
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - reserved + 1, special_tokens=[UNKNOWN], unk_token=UNKNOWN, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer, length=len(sample))
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"]
    # The trainer can neither place special tokens nor make byte pieces, so the model is put together anew.
    pieces = [(piece, score) for piece, score in learnt if piece not in (*SPECIAL_TOKENS, *BYTES, MASK)]
    pieces = sorted(pieces, key=lambda piece: -piece[1])[: vocab_size - reserved]
    reserved_pieces = [(token, 0.0) for token in SPECIAL_TOKENS] + [(byte, NEVER_MATCHED) for byte in BYTES]
    vocabulary = [*reserved_pieces, *pieces, (MASK, 0.0)]
    tokenizer.model = models.Unigram(vocabulary, unk_id=SPECIAL_TOKENS.index(UNKNOWN), byte_fallback=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="right",
        model_max_length=max_length,
        **ROLES,
    )


def _sample(texts: Iterable[str]) -> list[str]:
    """At most MOST_TEXTS of the texts, each as likely as any other (reservoir sampling), the same every time."""
    draw = random.Random(0)
    sample: list[str] = []
    for i, text in enumerate(texts):
        if len(sample) < MAX_TEXTS:
            sample.append(text[:MAX_CHARACTERS_PER_TEXT])
        elif (place := int(draw.random() * (i + 1))) < MAX_TEXTS:
            sample[place] = text[:MAX_CHARACTERS_PER_TEXT]
    return sample


def _without_rare_characters(texts: list[str], most: int) -> list[str]:
    """The texts with blanks for all but the `most` frequent characters.

    The trainer keeps every character as a piece and fails where they do not fit; bytes stand for the rest.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if len(counts) <= most:
        return texts
    rare = {ord(character): " " for character, _ in counts.most_common()[most:]}
    return [text.translate(rare) for text in texts]


def _normalizer(lowercase: bool) -> normalizers.Normalizer:
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps + ([normalizers.Lowercase()] if lowercase else []))


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"{UNSPACED}+|\p{{N}}|[^\p{{L}}\p{{M}}\p{{N}}\s]"), behavior="isolated"),
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            # Only words that blanks part keep the mark of their beginning. Chinese words stand anywhere in a run and
            # would be learnt twice; before a digit or a sign the mark would be a token of its own, one in eight.
            pre_tokenizers.Split(Regex(rf"^▁(?={UNSPACED}|[^\p{{L}}\p{{M}}])"), behavior="removed"),
        ]
    )
