"""A tokenizer trained on the training texts, for a model from scratch: byte pair encoding with byte fallback."""

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
# An unseen character is encoded as its UTF-8 bytes and not as <unk>, so that two rare characters (above all of Chinese
# names) stay distinct. The bytes take 256 entries of the vocabulary.
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Scripts without spaces between words.
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}ー]"
# More texts hardly change the vocabulary but take longer: a random sample is used.
MAX_TEXTS = 50_000
MAX_CHARACTERS_PER_TEXT = 2_000


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, *, lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """Train a tokenizer with XLM-R's special tokens: `<s> text </s>`, padded on the right.

    Texts are normalised (NFKC, whitespace as single spaces). Words, runs of Chinese characters, digits and other
    characters are split before tokens are learnt, so that a Latin word has the same tokens after a space, a bracket and
    a Chinese character.

    The same texts give the same file in any process and on any machine: byte pair encoding (Sennrich et al., "Neural
    Machine Translation of Rare Words with Subword Units", 2016) counts in integers and breaks ties by token id. The
    Unigram trainer of `tokenizers` sums floating point numbers, and numbers characters, in the order of a hash table
    with a random seed. Both give the quickstart the same nDCG@10 (0.632, mean of its sets).

    Args:
        texts: queries and documents.
        vocab_size: number of tokens, including special tokens and bytes; fewer if there are few texts.
        max_length: tokens of a text, including special tokens; the tokenizer's `model_max_length`.
        lowercase: fold capital letters. XLM-R does not, but a small vocabulary learnt from few texts is better without
            capital letters.

    Raises:
        DataError: there are no texts.
        ConfigError: `vocab_size` is too small.
    """
    reserved = len(SPECIAL_TOKENS) + len(BYTES) + 1
    if vocab_size < reserved + 100:
        raise ConfigError(f"model.vocab_size={vocab_size} must be at least {reserved + 100}: {reserved} are reserved")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(lowercase)
    sample = [tokenizer.normalizer.normalize_str(text) for text in _sample(texts)]
    if not any(sample):
        raise DataError("a vocabulary cannot be trained: there are no training texts")
    sample = _without_rare_characters(sample, max_characters=(vocab_size - reserved) // 2)
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, special_tokens=[*SPECIAL_TOKENS, *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer, length=len(sample))
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = model["vocab"] | {MASK: len(model["vocab"])}
    merges = [(first, second) for first, second in model["merges"]]
    # The trainer cannot put <mask> last, and its model has no byte fallback.
    tokenizer.model = models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True)
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
    """At most MAX_TEXTS of the texts, drawn uniformly (reservoir sampling) with a fixed seed."""
    draw = random.Random(0)
    sample: list[str] = []
    for i, text in enumerate(texts):
        if len(sample) < MAX_TEXTS:
            sample.append(text[:MAX_CHARACTERS_PER_TEXT])
        elif (index := int(draw.random() * (i + 1))) < MAX_TEXTS:
            sample[index] = text[:MAX_CHARACTERS_PER_TEXT]
    return sample


def _without_rare_characters(texts: list[str], max_characters: int) -> list[str]:
    """The texts with spaces for all but the most frequent characters.

    The trainer keeps every character as a token, beyond `vocab_size` too; bytes stand for the rare ones.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if len(counts) <= max_characters:
        return texts
    rare = {ord(character): " " for character, _ in counts.most_common()[max_characters:]}
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
            # Only words after a space keep the mark of their beginning. Chinese words occur anywhere in a run and would
            # be learnt twice; before a digit or a sign the mark would be a token of its own, one token in eight.
            pre_tokenizers.Split(Regex(rf"^▁(?={UNSPACED}|[^\p{{L}}\p{{M}}])"), behavior="removed"),
        ]
    )
