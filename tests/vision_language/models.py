"""Small random vision-language models as transformers saves them, with tokenizers, processors and chat templates."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from tests.small import WORDS
from tests.vision_models import CONFIGS, QWEN, randomise

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>",
    "<end_of_utterance>", "[CLS]", "[SEP]", "<bos>",
]  # fmt: skip
_SPLIT = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_QWEN_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_IDEFICS_TEMPLATE = """\
{{- '<|im_start|>' }}{% for message in messages %}{{ message.role | capitalize }}
{%- if message.content[0].type == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for part in message.content %}{% if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{{ '<end_of_utterance>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS) + "\n\n\nsystem\nuser\n"] * 20, trainer)
    return str(tokenizer.to_str())


def vision_tokenizer(architecture: str) -> PreTrainedTokenizerFast:
    """Bytes and parts of words, split as Qwen's, which joins line breaks."""
    tokenizer = Tokenizer.from_str(_backend())
    options: dict[str, Any] = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    if architecture == "modernvbert":
        options = {"pad_token": "<|endoftext|>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    elif architecture == "idefics3":
        options["bos_token"] = "<|im_start|>"
    elif architecture == "paligemma":
        options |= {"bos_token": "<bos>", "padding_side": "left"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=600, **options)
    made.add_tokens(SPECIAL, special_tokens=True)
    if architecture == "modernvbert":
        ids = [(token, made.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ids)
    return made


def save_vision_model(architecture: str, folder: Path, *, chat: bool = True) -> Path:
    """A directory as those of the Hub, with or without a chat template."""
    directory, tokenizer = folder / architecture, vision_tokenizer(architecture)
    is_qwen = architecture in QWEN

    def number(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    config = json.loads(json.dumps(CONFIGS[architecture]))
    config["text_config"] |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config["image_token_id"] = number("<|image_pad|>" if is_qwen else "<image>")
    if is_qwen:
        config |= {"video_token_id": number("<|video_pad|>"), "vision_start_token_id": number("<|vision_start|>")}
        config["vision_end_token_id"] = number("<|vision_end|>")
    made = AutoConfig.for_model(architecture, **config)
    model = randomise(AutoModel.from_config(made))
    model.save_pretrained(directory)
    if chat and architecture != "paligemma":
        tokenizer.chat_template = _QWEN_TEMPLATE if is_qwen else _IDEFICS_TEMPLATE
    tokenizer.save_pretrained(directory)
    image: dict[str, Any]
    if is_qwen:
        image = {
            "image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 128, "longest_edge": 1024},
            "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(image))
        return directory
    if architecture == "paligemma":
        image = {
            "image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}, "image_seq_length": 16,
            "processor_class": "PaliGemmaProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(image))
        return directory
    kind = "SmolVLM" if architecture == "smolvlm" else "Idefics3"
    image = {
        "image_processor_type": f"{kind}ImageProcessor", "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16}, "do_image_splitting": True,
    }  # fmt: skip
    processor = {"image_processor": image, "processor_class": f"{kind}Processor", "image_seq_len": 4}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory
