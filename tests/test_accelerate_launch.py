"""`accelerate launch -m embedtrain` trains like torchrun, with the file that `accelerate config` wrote."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.commands import ENVIRONMENT
from tests.config.test_accelerate import FSDP2
from tests.small import save_small, small_model, write_rows
from tests.test_commands import OPTIONS

ACCELERATE = str(Path(sys.executable).with_name("accelerate"))


@pytest.mark.slow
def test_two_processes_train_as_under_torchrun(tmp_path):
    """On CPUs accelerate starts several processes only for FSDP: `--cpu` starts one, or requires MPI."""
    write_rows(tmp_path / "train.jsonl", 20)
    save_small(small_model("xlm-roberta"), tmp_path / "model")
    fsdp = FSDP2["fsdp_config"] | {"fsdp_transformer_layer_cls_to_wrap": "XLMRobertaLayer"}
    file = FSDP2 | {"fsdp_config": fsdp, "num_processes": 2, "mixed_precision": "no"}
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(file))
    own = [option for option in OPTIONS if not option.startswith(("parallel.", "evaluation."))]
    command = ["launch", "--config_file", "fsdp.yaml", "-m", "embedtrain", *own, "train.steps=2", "output_dir=run"]
    completed = subprocess.run(
        [ACCELERATE, *command, "parallel.accelerate_config=fsdp.yaml", "export.check=false"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output
    assert "t on 2 ranks (cpu)" in output
    assert output.count("ignored in the environment: ACCELERATE_") == 1
    assert "fsdp.yaml: mixed_precision=no -> parallel.precision=fp32" in output
    layout = r"^fsdp: 1 x 2 ranks .* 2 XLMRobertaLayer \+ root, activations recomputed; requested: "
    assert re.search(layout, output, re.MULTILINE)
    assert (tmp_path / "run" / "model" / "modules.json").is_file()
    resolved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert resolved["parallel"]["strategy"] == "fsdp"
    assert resolved["parallel"]["activation_checkpointing"] is True
    assert resolved["parallel"]["precision"] == "fp32"
