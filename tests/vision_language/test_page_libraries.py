"""Late interaction over pages: directories written for the other library, and adapters of colpali-engine."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from embedtrain.commands.export import compose, run
from embedtrain.commands.merge import compose as compose_merge
from embedtrain.commands.merge import run as merge
from embedtrain.commands.verify import compose as compose_verify
from embedtrain.commands.verify import run as verify
from embedtrain.config.recipe import LoraConfig
from embedtrain.errors import ConfigError, ModelError
from tests.late_vision_models import (
    ARCHITECTURES,
    ENGINE,
    TRANSFORMERS,
    TRANSFORMERS_CLASSES,
    late_oracle,
    save_late_adapter,
    save_late_model,
)
from tests.marks import slow_but
from tests.vision_language.test_late_interaction import opened

LIBRARIES = {TRANSFORMERS: "transformers", ENGINE: "colpali_engine"}
CONVERTED = [(writer, architecture) for writer in LIBRARIES for architecture in TRANSFORMERS_CLASSES]
QUERY, PAGE = "who and where?", Image.new("RGB", (32, 16), (10, 210, 60))


def convert(directory: Path, writer: str, output_dir: Path, *more: str) -> Path:
    """Write a directory for a library, in this process."""
    library = f"page_library={LIBRARIES[writer]}"
    return run(compose([f"model={directory}", library, f"output_dir={output_dir}", *more]))


@pytest.mark.parametrize("case", slow_but({(TRANSFORMERS, "qwen2_vl")}, CONVERTED), ids="-".join)
def test_converted(tmp_path, capsys, case):
    """The other library computes of the directory what the encoder does, which the export compares."""
    writer, architecture = case
    directory = save_late_model(writer, architecture, tmp_path, dimension=128)
    other = ENGINE if writer == TRANSFORMERS else TRANSFORMERS
    converted = convert(directory, other, tmp_path / "converted")
    printed = capsys.readouterr().out
    sides = [late_oracle(writer, directory), late_oracle(other, converted)]
    for role, item in (("query", QUERY), ("document", PAGE)):
        before, after = (side.vectors(role, item) for side in sides)
        if architecture == "modernvbert":  # both classes compute the same
            torch.testing.assert_close(before, after, atol=1e-6, rtol=0)
        else:
            assert before.shape != after.shape or (before - after).abs().max() > 1e-3
    assert ("positions in a page" in printed) == (architecture in ("qwen2_vl", "qwen2_5_vl"))
    assert "cosine 1.0000 in the mean" in printed or architecture != "modernvbert"
    assert "probe pages: cosine 0.9" in printed or architecture == "modernvbert"
    source, _ = opened(converted)
    assert source.settings.writer.library.value == LIBRARIES[other]
    again = convert(converted, writer, tmp_path / "again", "check=false")
    torch.testing.assert_close(
        late_oracle(writer, again).vectors("document", PAGE), sides[0].vectors("document", PAGE), atol=0, rtol=0
    )


def test_not_converted(tmp_path):
    qwen3 = save_late_model(ENGINE, "qwen3_vl", tmp_path)
    qwen2 = save_late_model(TRANSFORMERS, "qwen2_vl", tmp_path)
    cases = {
        "page_library=transformers: it has no class over pages for qwen3_vl": (qwen3, "transformers"),
        "page_library=colpali_engine: .*qwen3_vl is a ColQwen3 of colpali-engine already": (qwen3, "colpali_engine"),
        "a ColQwen2 of colpali-engine has vectors of 128 dimensions, and those of .* have 16": (
            qwen2,
            "colpali_engine",
        ),
    }
    for says, (directory, library) in cases.items():
        with pytest.raises(ConfigError, match=says):
            run(compose([f"model={directory}", f"page_library={library}", f"output_dir={tmp_path / 'out'}"]))
    with pytest.raises(ConfigError, match="page_library is missing; for a checkpoint write run=RUN"):
        compose([f"model={qwen2}", f"output_dir={tmp_path / 'out'}"])
    with pytest.raises(ConfigError, match="step=best: is for a run"):
        compose([f"model={qwen2}", "page_library=transformers", f"output_dir={tmp_path / 'out'}", "step=best"])
    with pytest.raises(ConfigError, match="page_library=transformers: is for a model directory"):
        compose(["run=runs/x", "page_library=transformers"])


@pytest.mark.parametrize("architecture", slow_but({"qwen2_vl"}, ARCHITECTURES[ENGINE]))
def test_adapters_of_colpali_engine(tmp_path, architecture):
    """Merged by `merge`, which begins with what commands and trainings read: of layers, and of the projection."""
    directory = save_late_model(ENGINE, architecture, tmp_path)
    adapter, merged = save_late_adapter(architecture, directory, tmp_path)
    renamed = {"qwen2_vl": ".model.", "qwen2_5_vl": ".model.", "paligemma": ".language_model.model."}.get(architecture)
    if renamed is not None:  # published adapters have the names of older versions of transformers
        weights = load_file(adapter / "adapter_model.safetensors")
        old = {name.replace(".language_model.", renamed): value for name, value in weights.items()}
        save_file(old, adapter / "adapter_model.safetensors", {"format": "pt"})
    output_dir = merge(compose_merge([f"models=[{adapter}]", f"output_dir={tmp_path / 'out'}"]))
    ours, theirs, base = (late_oracle(ENGINE, path) for path in (output_dir, merged, directory))
    for role, item in (("query", QUERY), ("document", PAGE)):
        torch.testing.assert_close(ours.vectors(role, item), theirs.vectors(role, item), atol=1e-6, rtol=0)
        assert (ours.vectors(role, item) - base.vectors(role, item)).abs().max() > 1e-2


def test_adapters_of_other_models(tmp_path):
    directory = save_late_model(ENGINE, "qwen2_vl", tmp_path)
    adapter, _ = save_late_adapter("qwen2_vl", directory, tmp_path)
    other = save_late_model(ENGINE, "qwen3_vl", tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    with pytest.raises(ModelError, match="is an adapter of another model"):
        merge(compose_merge([f"models=[{adapter}]", f"output_dir={tmp_path / 'out'}"]))
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True, "r": 4, "lora_alpha": 6}))
    source, _ = opened(directory, lora=LoraConfig(path=str(adapter)))
    (dense,) = source.vectors.dense
    assert dense.adapter is not None
    assert dense.adapter.scale == 3.0  # 6 / sqrt(4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2_vl", "paligemma"])
def test_verify_compares_drawn_pages(tmp_path, architecture):
    """Beside queries and texts, by transformers and by sentence-transformers."""
    directory = save_late_model(TRANSFORMERS, architecture, tmp_path)
    arguments = [f"model={directory}", "engines=[transformers,sentence_transformers]"]
    outcomes = verify(compose_verify(arguments))
    for outcome in outcomes:
        assert outcome.differences is not None
        assert outcome.differences.keys() == {"query", "document", "page"}
    assert len(outcomes) == 2
