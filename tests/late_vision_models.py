"""Small random models of late interaction over pages, as transformers and colpali-engine save them, and their vectors.

Those of colpali-engine are made without it: of transformers' base models, with the names and files of its classes.
`tests/vision_language/test_colpali_engine.py` compares both with the package where it is installed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.vision_language.models import save_vision_model
from tests.vision_models import QWEN, randomise

if TYPE_CHECKING:
    from PIL.Image import Image

TRANSFORMERS, ENGINE = "transformers", "colpali-engine"
# By `model_type` of the base model: the classes of each writer.
TRANSFORMERS_CLASSES = {
    "paligemma": "ColPali", "qwen2_vl": "ColQwen2", "qwen2_5_vl": "ColQwen2", "modernvbert": "ColModernVBert",
}  # fmt: skip
ENGINE_CLASSES = {
    "paligemma": ("ColPali", "ColPaliProcessor"),
    "qwen2_vl": ("ColQwen2", "ColQwen2Processor"),
    "qwen2_5_vl": ("ColQwen2_5", "ColQwen2_5_Processor"),
    "qwen3_vl": ("ColQwen3", "ColQwen3Processor"),
    "idefics3": ("ColIdefics3", "ColIdefics3Processor"),
    "modernvbert": ("ColModernVBert", "ColModernVBertProcessor"),
}
ARCHITECTURES = {TRANSFORMERS: tuple(TRANSFORMERS_CLASSES), ENGINE: tuple(ENGINE_CLASSES)}
CASES = [(writer, architecture) for writer, known in ARCHITECTURES.items() for architecture in known]
_QWEN_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
_TILES_PAGE = "User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_ENGINE_PAGES = dict.fromkeys(QWEN, _QWEN_PAGE) | {
    "paligemma": "<image><bos>Describe the image.", "idefics3": "<|im_start|>" + _TILES_PAGE,
    "modernvbert": "<|begin_of_text|>" + _TILES_PAGE,
}  # fmt: skip
_NUM_AUGMENTED = 10
_TILE_TOKENS = 4
_PROJECTION = ("custom_text_proj.weight", "custom_text_proj.bias")


def save_late_model(writer: str, architecture: str, folder: Path, *, dimension: int | None = None) -> Path:
    """A directory of a writer; that of colpali-engine has the dimensions that its class demands, 320 or 128."""
    base = save_vision_model(architecture, folder / "base", chat=False)
    directory = folder / writer / architecture
    if writer == TRANSFORMERS:
        return _save_of_transformers(architecture, base, directory, dimension or 16)
    return _save_of_engine(architecture, base, directory, dimension or (320 if architecture == "qwen3_vl" else 128))


def _save_of_transformers(architecture: str, base: Path, directory: Path, dimension: int) -> Path:
    name, backbone = TRANSFORMERS_CLASSES[architecture], AutoConfig.from_pretrained(base)
    if architecture == "paligemma":
        backbone.text_config.vocab_size = 1536  # its processor adds more than a thousand tokens
    config = getattr(transformers, name + "Config")(vlm_config=backbone, embedding_dim=dimension)
    torch.manual_seed(1)
    randomise(getattr(transformers, name + "ForRetrieval")(config)).save_pretrained(directory)
    options = {"image_seq_len": _TILE_TOKENS} if architecture == "modernvbert" else {}
    processor_class, image_processor = getattr(transformers, name + "Processor"), _image_processor(architecture, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    processor_class(image_processor, tokenizer, **options).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)  # ColPali's adds tokens that real vocabularies have
    return directory


def _image_processor(architecture: str, directory: Path) -> Any:
    """Version 5.17 opens none of pictures in tiles by the general name without torchvision."""
    image_class = Idefics3ImageProcessorPil if architecture in ("idefics3", "modernvbert") else AutoImageProcessor
    return image_class.from_pretrained(directory)


def _save_of_engine(architecture: str, base: Path, directory: Path, dimension: int) -> Path:
    class_name, processor_class = ENGINE_CLASSES[architecture]
    torch.manual_seed(1)
    model = randomise(AutoModel.from_config(AutoConfig.from_pretrained(base)))
    projection = nn.Linear(model.config.get_text_config().hidden_size, dimension)
    weights = {engine_name(architecture, name): tensor.clone() for name, tensor in model.state_dict().items()}
    weights |= {
        engine_name(architecture, f"custom_text_proj.{name}"): tensor.detach() * 3
        for name, tensor in projection.named_parameters()
    }
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [class_name]}))
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    old, new = base / "preprocessor_config.json", base / "processor_config.json"
    processor = json.loads(new.read_text()) if new.is_file() else {"image_processor": json.loads(old.read_text())}
    processor["image_processor"].pop("processor_class", None)
    if architecture in QWEN:
        processor["video_processor"] = {"video_processor_type": "Qwen2VLVideoProcessor"}
    processor["processor_class"] = processor_class
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def engine_name(architecture: str, name: str) -> str:
    """The name in files of colpali-engine of a weight of the base model, or of its `custom_text_proj`."""
    is_projection = name.startswith("custom_text_proj.")
    if architecture == "qwen3_vl":
        return f"model.{name}"
    if architecture == "idefics3":
        return name.replace("custom_text_proj", "linear") if is_projection else f"model.{name}"
    if architecture == "modernvbert":
        prefix = "base_model.model." if is_projection or name.startswith("text_model.") else ""
        return prefix + (name if is_projection else f"model.{name}")
    if architecture == "paligemma" and not is_projection:
        return "model." + name.replace("language_model.", "language_model.model.", 1)
    return name


def save_late_adapter(architecture: str, directory: Path, folder: Path, *, rank: int = 4) -> tuple[Path, Path]:
    """An adapter of PEFT for a directory of colpali-engine, on projections of tokens too, and its merged directory."""
    linear = "linear" if architecture == "idefics3" else "custom_text_proj"
    stored = load_file(directory / "model.safetensors")
    adapted = ("o_proj.weight", "down_proj.weight", "Wqkv.weight", f"{linear}.weight")
    generator, adapter, merged = torch.Generator().manual_seed(2), {}, dict(stored)
    for name, weight in sorted(stored.items()):
        if not name.endswith(adapted) or "vision" in name or "visual" in name:
            continue
        a, b = (torch.randn(size, generator=generator) * 0.1 for size in ((rank, weight.shape[1]), (len(weight), rank)))
        key = "base_model.model." + _module_name(architecture, name).removesuffix(".weight")
        adapter |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        merged[name] = weight + 2 * b @ a
    files, whole = folder / "adapter" / architecture, folder / "merged" / architecture
    files.mkdir(parents=True)
    whole.mkdir(parents=True)
    save_file(adapter, files / "adapter_model.safetensors", {"format": "pt"})
    layers = "o_proj|down_proj|Wqkv"
    settings = {
        "peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "base_model_name_or_path": str(directory),
        "target_modules": f"(.*(model)(?!.*(visual|vision)).*({layers}).*$|.*({linear}).*$)",
    }  # fmt: skip
    (files / "adapter_config.json").write_text(json.dumps(settings))
    for path in directory.iterdir():
        if path.name != "model.safetensors":
            (whole / path.name).write_bytes(path.read_bytes())
    save_file(merged, whole / "model.safetensors", {"format": "pt"})
    return files, whole


def _module_name(architecture: str, name: str) -> str:
    """The name in the class of a weight in files of colpali-engine."""
    if architecture == "qwen3_vl":
        return name.removeprefix("model.")
    if architecture == "paligemma" and name.startswith("model."):
        return "model." + name.replace("language_model.model.", "language_model.", 1)
    return name.removeprefix("base_model.model.")


@dataclass(frozen=True)
class LateOracle:
    """The vectors [R, D] of a query, of a document that is a text, and of a page, each by itself, as a writer does.

    Attributes:
        inputs: what the model gets of a text and of a page: of its `input_ids` are the tests of tokens.
    """

    model: Callable[..., Tensor]
    inputs: Callable[[str, "str | Image"], dict[str, Any]]

    def vectors(self, role: str, item: "str | Image") -> Tensor:
        with torch.no_grad():
            return self.model(**self.inputs(role, item))[0]

    def ids(self, role: str, item: "str | Image") -> list[int]:
        ids: list[int] = self.inputs(role, item)["input_ids"][0].tolist()
        return ids


def late_oracle(writer: str, directory: Path) -> LateOracle:
    """The vectors of a directory of a writer: transformers' class, or what colpali-engine's class computes."""
    return _oracle_of_transformers(directory) if writer == TRANSFORMERS else _oracle_of_engine(directory)


def _oracle_of_transformers(directory: Path) -> LateOracle:
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(directory).eval()
    architecture, options = model.config.vlm_config.model_type, {"image_seq_len": _TILE_TOKENS}
    processor = getattr(transformers, name.removesuffix("ForRetrieval") + "Processor")(
        _image_processor(architecture, directory),
        AutoTokenizer.from_pretrained(directory),
        **(options if architecture == "modernvbert" else {}),
    )

    def inputs(role: str, item: "str | Image") -> dict[str, Any]:
        """Texts are queries, also as documents: the processor has no other way."""
        made = processor.process_queries([item]) if isinstance(item, str) else processor.process_images([item])
        return {name: value for name, value in made.items() if name != "labels"}

    return LateOracle(lambda **given: model(**given).embeddings, inputs)


def _oracle_of_engine(directory: Path) -> LateOracle:
    """Transformers' base model, with positions along three axes, and the projection."""
    config = AutoConfig.from_pretrained(directory)
    architecture = config.model_type
    model, (weight, bias) = _engine_weights(architecture, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pages = _engine_pages(architecture, directory, tokenizer, int(config.image_token_id))
    pad = tokenizer.pad_token if architecture == "paligemma" else "<|endoftext|>"
    augmented = ("<end_of_utterance>" if architecture in ("idefics3", "modernvbert") else pad) * _NUM_AUGMENTED
    start = "<bos>" if architecture == "paligemma" else ""

    def inputs(role: str, item: "str | Image") -> dict[str, Any]:
        if not isinstance(item, str):
            return pages(item)
        text = start + item + (augmented if role == "query" else "")
        return dict(tokenizer([text], return_tensors="pt", return_token_type_ids=False))

    def vectors(input_ids: Tensor, **given: Any) -> Tensor:
        if architecture in QWEN:
            given["mm_token_type_ids"] = (input_ids == config.image_token_id).long()
        hidden = model(input_ids=input_ids, **given).last_hidden_state
        return F.normalize(F.linear(hidden, weight, bias), dim=-1)

    return LateOracle(vectors, inputs)


def _engine_weights(architecture: str, directory: Path) -> tuple[PreTrainedModel, Sequence[Tensor]]:
    """Those that the package writes, or with the names of its class, which it reads as well."""
    stored = load_file(directory / "model.safetensors")
    model = AutoModel.from_config(AutoConfig.from_pretrained(directory)).eval()
    own = {name: _of_class(architecture, name) for name in (*model.state_dict(), *_PROJECTION)}
    weights = {
        name: stored[in_class] if in_class in stored else stored[engine_name(architecture, name)]
        for name, in_class in own.items()
    }
    projection = [weights.pop(name) for name in _PROJECTION]
    model.load_state_dict(weights)
    return model, projection


def _of_class(architecture: str, name: str) -> str:
    """The name in a class of colpali-engine of a weight of the base model, or of its projection."""
    if name in _PROJECTION:
        return name.replace("custom_text_proj", "linear") if architecture == "idefics3" else name
    return {"paligemma": "model.model.", "idefics3": "model.", "modernvbert": "model."}.get(architecture, "") + name


def _engine_pages(
    architecture: str, directory: Path, tokenizer: PreTrainedTokenizerBase, image_id: int
) -> "Callable[[Image], dict[str, Any]]":
    """The inputs of a page: the processor of transformers, which for Qwen needs torchvision, or what it writes."""
    image_processor, text = _image_processor(architecture, directory), _ENGINE_PAGES[architecture]
    if architecture in QWEN:

        def page(image: "Image") -> dict[str, Any]:
            made = dict(image_processor([image.convert("RGB")], return_tensors="pt"))
            count = int(made["image_grid_thw"].prod()) // image_processor.merge_size**2
            written = text.replace("<|image_pad|>", "<|image_pad|>" * count)
            return made | dict(tokenizer([written], return_tensors="pt", return_token_type_ids=False))

        return page
    options = {} if architecture == "paligemma" else {"image_seq_len": _TILE_TOKENS}
    name = "PaliGemma" if architecture == "paligemma" else "Idefics3"
    processor = getattr(transformers, f"{name}Processor")(image_processor, tokenizer, **options)
    kept = {"input_ids", "attention_mask", "pixel_values", "token_type_ids", "pixel_attention_mask"}

    def tiled(image: "Image") -> dict[str, Any]:
        made = processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")
        return {name: value for name, value in made.items() if name in kept}

    return tiled
