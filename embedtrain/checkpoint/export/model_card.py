"""The model card: description, usage, evaluation results and recipe of a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from embedtrain import __version__
from embedtrain.config.checks import is_repository_name
from embedtrain.config.recipe import ONNX


def model_card(
    recipe: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, float]],
    *,
    step: int,
    dimension: int,
    max_length: int,
    prompts: Mapping[str, str],
    formats: Sequence[str] = (),
    name: str | None = None,
) -> str:
    """README.md of a model directory.

    `metrics` are evaluation set -> metric -> value at this step; `prompts` those of queries and documents; `name` is
    the id of the Hub repository to which it is uploaded.
    """
    base = recipe["model"].get("path")
    onnx = ONNX in formats
    header: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentence-similarity", "feature-extraction", "embedtrain"] + [ONNX] * onnx,
    }
    if base and is_repository_name(str(base)) and not Path(base).is_dir():  # the Hub rejects other values
        header |= {"base_model": base, "base_model_relation": "finetune"}
    origin = f"fine-tuned from `{base}`" if base else "trained from random weights"
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        f"# {recipe['name']}",
        "",
        f"A text-embedding model with {dimension} dimensions for texts of up to {max_length} tokens, {origin} with "
        f"embedtrain {__version__}; weights of step {step}.",
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{name or "path/of/this/directory"}")',
        'queries = model.encode_query(["a question"])',
        'documents = model.encode_document(["a text that answers it"])',
        "print(model.similarity(queries, documents))",
        "```",
        "",
    ]
    if any(prompts.values()):
        lines += ["`encode_query` and `encode_document` prepend the prompts that the model was trained with.", ""]
    if onnx:
        lines += [
            "`onnx/model.onnx` is the same model in fp32, from token ids to `last_hidden_state`, for onnxruntime, or "
            'for sentence-transformers and optimum with `backend="onnx"`.',
            "",
        ]
    if metrics:
        names = list(dict.fromkeys(metric for row in metrics.values() for metric in row))
        lines += ["## Evaluation", "", f"| set | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
        lines += [
            f"| {name} | {' | '.join(f'{row[m]:.4f}' if m in row else '' for m in names)} |"
            for name, row in metrics.items()
        ]
        lines.append("")
    lines += [
        "## Recipe",
        "",
        "```yaml",
        yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True).strip(),
        "```",
        "",
    ]
    return "\n".join(lines)
