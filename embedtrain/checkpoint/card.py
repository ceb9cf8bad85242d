"""The model card: what the model is, how it was trained, what it measured, how to use it."""

from collections.abc import Mapping
from typing import Any

import yaml

from embedtrain import __version__


def model_card(
    recipe: Mapping[str, Any],
    figures: Mapping[str, Mapping[str, float]],
    *,
    step: int,
    dimension: int,
    max_length: int,
    prompts: Mapping[str, str],
) -> str:
    """README.md of a model directory.

    Args:
        recipe: the resolved recipe as plain dictionaries.
        figures: evaluation set -> metric -> value, of this step; may be empty.
        step: the optimiser step the weights are of.
        dimension: size of a vector.
        max_length: tokens of a text that are read.
        prompts: what is put before queries and documents, by name.
    """
    base = recipe["model"].get("path")
    header: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentence-similarity", "feature-extraction", "embedtrain"],
    }
    if base and not str(base).startswith(("/", ".", "~")):
        header["base_model"] = base
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
        'model = SentenceTransformer("path/of/this/directory")',
        'queries = model.encode_query(["a question"])',
        'documents = model.encode_document(["a text that answers it"])',
        "print(model.similarity(queries, documents))",
        "```",
        "",
    ]
    if any(prompts.values()):
        lines += ["`encode_query` and `encode_document` put the prompts in front that the model was trained with.", ""]
    if figures:
        names = list(dict.fromkeys(metric for row in figures.values() for metric in row))
        lines += ["## Figures", "", f"| set | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
        lines += [
            f"| {name} | {' | '.join(f'{row[m]:.4f}' if m in row else '' for m in names)} |"
            for name, row in figures.items()
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
