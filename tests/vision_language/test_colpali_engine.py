"""What tests say of colpali-engine, compared with the package: on demand, where it is installed.

It needs torchvision, which tests do not install. To run: `pip install colpali-engine`, in an environment of its own.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.late_vision_models import (
    ENGINE,
    ENGINE_CLASSES,
    LateOracle,
    late_oracle,
    save_late_adapter,
    save_late_model,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("colpali_engine") is None, reason="colpali-engine is not installed"),
]
Image = pytest.importorskip("PIL.Image")
QUERIES = ("who and where?", "  two\nlines\n", "a query of more words than the others about the cities of the world")


def engine_oracle(architecture: str, directory: Path, processor: Path | None = None) -> LateOracle:
    """The class of colpali-engine and its processor."""
    package: Any = importlib.import_module("colpali_engine.models")
    model_class, processor_class = (getattr(package, name) for name in ENGINE_CLASSES[architecture])
    model = model_class.from_pretrained(directory).eval()
    made = processor_class.from_pretrained(processor or directory)

    def inputs(role: str, item: Any) -> dict[str, Any]:
        if not isinstance(item, str):
            values = made.process_images([item])
        else:
            values = made.process_queries([item]) if role == "query" else made.process_texts([item])
        return {name: value for name, value in values.items() if name != "labels"}

    return LateOracle(model, inputs)


def pages() -> list[Any]:
    """Square, wide and narrow, of sizes that no processor of the tests resizes but for tiles, which have one colour."""
    return [Image.new("RGB", size, color) for size, color in (((16, 16), (200, 40, 90)), ((32, 16), (10, 210, 60)))]


def require_equal(ours: LateOracle, theirs: LateOracle) -> None:
    for role, item in [("query", text) for text in QUERIES] + [("document", text) for text in QUERIES]:
        assert ours.ids(role, item) == theirs.ids(role, item), role
        torch.testing.assert_close(ours.vectors(role, item), theirs.vectors(role, item), atol=1e-6, rtol=0)
    for page in pages():
        assert ours.ids("document", page) == theirs.ids("document", page)
        torch.testing.assert_close(ours.vectors("document", page), theirs.vectors("document", page), atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", ENGINE_CLASSES)
def test_what_the_oracle_computes_is_what_the_package_computes(architecture, tmp_path):
    directory = save_late_model(ENGINE, architecture, tmp_path)
    require_equal(late_oracle(ENGINE, directory), engine_oracle(architecture, directory))
    adapter, merged = save_late_adapter(architecture, directory, tmp_path)
    require_equal(late_oracle(ENGINE, merged), engine_oracle(architecture, adapter, directory))
