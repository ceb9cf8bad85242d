"""A model directory of one base model and the adapters of several tasks, each in PEFT's format in `adapters/TASK`.

The base is stored once, and sentence-transformers and transformers open it without an adapter. Their `load_adapter`
reads the folders, and `set_adapter` chooses the task.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from safetensors.torch import save

from embedtrain.errors import CheckpointError
from embedtrain.formats.adapters import AdapterCheckpoint, copy_adapter_config
from embedtrain.formats.sentence_transformers import load_model
from embedtrain.formats.usage import TAGS, describe_model, pipeline_tag
from embedtrain.formats.verify import (
    AdapterBase,
    ExportReference,
    check_adapter,
    probes_of_sentence_transformer,
    require_match,
)
from embedtrain.models.adapter_files import WEIGHTS, peft_key
from embedtrain.models.module_settings import SETTINGS, TASKS_FOLDER
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json


@dataclass(frozen=True)
class TaskAdapter:
    """The adapter of one task.

    Attributes:
        task: its name, that of its folder.
        checkpoint: where it is read from.
        base: its settings, and the model that it was trained on.
        prompts: those of its run, by name.
        description: its run and step, for the model card.
        reference: what the export has to reproduce; None if it is not checked.
    """

    task: str
    checkpoint: AdapterCheckpoint
    base: AdapterBase
    prompts: Mapping[str, str]
    description: str
    reference: ExportReference | None

    @property
    def folder(self) -> str:
        """Its folder below the model directory."""
        return f"{TASKS_FOLDER}/{self.task}"


def joint_prompts(adapters: Sequence[TaskAdapter]) -> dict[str, str]:
    """The prompts of the directory: `TASK_query` and `TASK_document`, and under their own names those of all tasks."""
    first = adapters[0].prompts
    prompts = {name: text for name, text in first.items() if all(a.prompts.get(name) == text for a in adapters)}
    own = {f"{a.task}_{role}": a.prompts.get(role, "") for a in adapters for role in ("query", "document")}
    return {"query": "", "document": ""} | prompts | own


def write_task_adapters(directory: Path, adapters: Sequence[TaskAdapter]) -> None:
    """Write the folders of the adapters into a model directory, and the prompts of all tasks."""
    for adapter in adapters:
        folder = directory / adapter.folder
        copy_adapter_config(adapter.base.directory, folder)
        weights = {
            peft_key(name.removeprefix("backbone.")): tensor.float()
            for name, tensor in adapter.checkpoint.trained().items()
        }
        (folder / WEIGHTS).write_bytes(save(weights, {"format": "pt"}))  # files of `save_file` have the mode 0600
    settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    write_json(directory / SETTINGS, settings | {"prompts": joint_prompts(adapters)})


def check_task_adapters(directory: Path, adapters: Sequence[TaskAdapter], source: ModelSource) -> float:
    """Load all adapters with sentence-transformers, and each with PEFT; the largest relative difference of vectors.

    Raises CheckpointError if a library cannot load them, or computes other vectors than the run of the task.
    """
    differences = [0.0]
    checked = [(adapter, adapter.reference) for adapter in adapters if adapter.reference is not None]
    for adapter, reference in checked:
        differences.append(check_adapter(directory / adapter.folder, adapter.base, source, reference))
    try:
        model = load_model("SentenceTransformer", directory, source)
        for adapter in adapters:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # The call in the model card, which also opens a repository of the Hub.
                arguments = {"subfolder": adapter.folder}
                model.load_adapter(str(directory), adapter_name=adapter.task, adapter_kwargs=arguments)
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot load the adapters in {directory / TASKS_FOLDER}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for adapter, reference in checked:
        model.set_adapter(adapter.task)
        vectors = probes_of_sentence_transformer(model)
        subject = f"sentence-transformers opens {directory} with the adapter {adapter.task}"
        expected = reference.truncated(source.truncate_dim)
        differences.append(require_match(vectors, expected, subject))
    return max(differences)


def tasks_card(
    adapters: Sequence[TaskAdapter], *, title: str, name: str, base: str | None, dimension: int, max_length: int
) -> str:
    """README.md of the directory; `name` is the Hub id or the path that its code opens, `base` the base model's id."""
    kind = "dense"
    metadata = {
        "base_model": base,
        "base_model_relation": "adapter" if base else None,
        "library_name": "sentence-transformers",
        "pipeline_tag": pipeline_tag(kind),
        "tags": ["sentence-transformers", *TAGS[kind], "peft", "lora", "embedtrain"],
    }
    header = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False).strip()
    tasks = ", ".join(f'"{adapter.task}"' for adapter in adapters)
    first = adapters[0].task
    rows = [
        f"| {a.task} | `{a.folder}` | {a.checkpoint.files.config.r} | {a.description} | "
        + " | ".join(_code(a.prompts.get(role, "")) for role in ("query", "document"))
        + " |"
        for a in adapters
    ]
    return "\n".join([
        *("---", header, "---", f"# {title}", ""),
        f"{describe_model(kind, dimension=dimension, max_length=max_length)}: one base model"
        f"{f', `{base}`,' if base else ''} and a LoRA adapter for each of {len(adapters)} tasks.",
        "",
        "| task | folder | rank | trained by | prompt of queries | prompt of documents |",
        "| --- | --- | ---: | --- | --- | --- |",
        *rows,
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{name}")',
        f"for task in [{tasks}]:",
        f'    folder = {{"subfolder": f"{TASKS_FOLDER}/{{task}}"}}',
        f'    model.load_adapter("{name}", adapter_name=task, adapter_kwargs=folder)',
        f'model.set_adapter("{first}")',
        f'queries = model.encode(["a question"], prompt_name="{first}_query")',
        f'documents = model.encode(["a text that answers it"], prompt_name="{first}_document")',
        "print(model.similarity(queries, documents))",
        "```",
        "",
        "Without an adapter, the directory is the base model. PEFT loads a folder with "
        "`PeftModel.from_pretrained(base, FOLDER)`.",
        "",
    ])  # fmt: skip


def _code(prompt: str) -> str:
    return "`` " + repr(prompt).replace("|", "\\|") + " ``" if prompt else ""
