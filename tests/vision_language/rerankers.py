"""Small random vision-language models that answer yes or no, in directories as their authors write them."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForImageTextToText

from embedtrain.utils.files import write_json
from tests.vision_language.models import save_vision_model, vision_tokenizer
from tests.vision_models import QWEN, randomise

PICTURES = {True: "<|vision_start|><|image_pad|><|vision_end|>", False: "<image>"}  # of Qwen-VL, and of others
# As a directory of sentence-transformers has it: contents are lists of parts.
PAIR_CHAT = """\
{%- macro parts(role) %}{% for message in messages if message.role == role %}{% for part in message.content %}
{%- if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}{% endmacro %}
{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct \
provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' }}
{%- set instruction = parts('system') %}{{ instruction if instruction else 'Find it.' }}
{{- '<Query>:' + parts('query') + '\\n<Document>:' + parts('document') }}
{{- '<|im_end|>\\n<|im_start|>assistant\\n' }}"""


def save_vision_reranker(
    architecture: str, folder: Path, *, tied: bool = False, scorer: bool = True, chat: str = PAIR_CHAT
) -> Path:
    """A model with a vocabulary head and the tokens yes and no; with `scorer`, a directory of CrossEncoder."""
    directory = save_vision_model(architecture, folder, chat=False)
    tokenizer = vision_tokenizer(architecture)
    tokenizer.add_tokens(["yes", "no"])
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {"vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    made = AutoConfig.for_model(config.pop("model_type"), **config | {"tie_word_embeddings": tied})
    model = randomise(AutoModelForImageTextToText.from_config(made))
    model.tie_weights()
    model.save_pretrained(directory)
    if scorer:
        tokenizer.chat_template = chat.replace("PICTURE", PICTURES[architecture in QWEN])
    tokenizer.save_pretrained(directory)
    if scorer:
        add_scorer(directory, tokenizer.convert_tokens_to_ids("yes"), tokenizer.convert_tokens_to_ids("no"))
    return directory


def add_scorer(directory: Path, true: int, false: int | None) -> None:
    """Add the files with which sentence-transformers reads `directory` as a reranker."""
    kinds = {
        "": "sentence_transformers.base.modules.transformer.Transformer",
        "1_LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    }
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(kinds.items())]
    write_json(directory / "modules.json", modules)
    ids = {"true_token_id": true, "false_token_id": false, "module_input_name": "causal_logits"}
    write_json(directory / "1_LogitScore/config.json", ids)
    output = {"method": "forward", "method_output_name": "logits"}
    message = output | {"format": "structured"}
    settings = {"transformer_task": "any-to-any", "modality_config": {"text": output, "message": message}}
    write_json(directory / "sentence_bert_config.json", settings | {"module_output_name": "causal_logits"})
    ours = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}
    write_json(directory / "config_sentence_transformers.json", ours)
