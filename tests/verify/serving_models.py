"""Exports with tokenizers as those of the published models of each architecture, trained on a few texts."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from embedtrain.config.recipe import Pooling
from embedtrain.formats.verify import PROBES
from tests.checkpoint.exporting import architecture_of, export_model
from tests.checkpoint.test_export_tokenizers import Family, gemma, llama3, qwen
from tests.small import POOLINGS, model_options, save_small, small_model
from tests.verify.test_verify import CHANGES

_TEXTS = [*PROBES, *(f"alpha beta gamma {number} naïve café compress files quickly" for number in range(50))]
_XLMR = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
_BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# The head of a character map of sentencepiece that changes no character: the size of a trie, and its empty nodes.
_NO_CHANGES = (1024).to_bytes(4, "little") + bytes(1025)


def _fast(tokenizer: Tokenizer, tokens: dict[str, str], pair: str) -> PreTrainedTokenizerFast:
    first, last = tokens["cls"], tokens["sep"]
    specials = [(token, tokenizer.token_to_id(token)) for token in (first, last)]
    single = f"{first} $A {last}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in tokens.items()}
    )


def bert() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=list(_BERT.values()), show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _fast(tokenizer, _BERT, "[CLS] $A [SEP] $B:1 [SEP]:1"), {"tokenizer_class": "BertTokenizer"}


def xlm_roberta() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, metaspace = normalizers.Precompiled(_NO_CHANGES), pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.decoder = decoders.Metaspace()
    specials = list(dict.fromkeys(_XLMR.values()))
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=specials, unk_token="<unk>", show_progress=False, initial_alphabet=[]
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _fast(tokenizer, _XLMR, "<s> $A </s> </s> $B </s>"), {"tokenizer_class": "XLMRobertaTokenizer"}


def modernbert() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = list(_BERT.values())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = _fast(tokenizer, _BERT, "[CLS] $A [SEP] $B [SEP]")
    fast.model_input_names = ["input_ids", "attention_mask"]
    return fast, {"tokenizer_class": "PreTrainedTokenizerFast"}


FAMILIES: dict[str, Family] = {
    "bert": bert,
    "xlm-roberta": xlm_roberta,
    "modernbert": modernbert,
    "qwen3": qwen,
    "llama": llama3,
    "gemma3_text": gemma,
}


def exported_with_tokenizer(folder: Path, architecture: str, *formats: str, **options: Any) -> Path:
    """An export of a random model, with texts of at most 100 tokens."""
    tokenizer, settings = FAMILIES[architecture]()
    config = small_model(architecture).config | CHANGES[architecture]
    config |= {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "hidden_size": 128, "head_dim": 64}
    for name in ("pad", "bos", "eos", "cls", "sep"):
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    if architecture == "llama":
        del config["rope_parameters"]
    model = folder / "model"
    save_small(small_model(architecture, config=config), model)
    tokenizer.save_pretrained(model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    is_dense = options.get("kind", "dense") == "dense"
    values = {"pooling": POOLINGS.get(architecture, Pooling.mean)} if is_dense else {}
    built = architecture_of(folder / "architecture", model_options(path=str(model), max_length=100, **values | options))
    export_model(folder / "out", built, formats=list(formats), check=False, onnx_min_agreement=0.5)
    return folder / "out"
