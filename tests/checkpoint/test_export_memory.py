"""Memory of an export relative to the size of the model."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from embedtrain.config.kinds import load_kind
from tests.checkpoint.exporting import architecture_of, export_model
from tests.memory import MB, memory_growth
from tests.small import model_options, save_language_model, save_small, small_model, write_rows

# Anonymous memory only: the system can drop pages of mapped files.
_MEASURED = """
import re, sys, threading, time
from pathlib import Path
import accelerate, onnxruntime, sentence_transformers, torch, transformers
from embedtrain.commands.export import convert
from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.export import run as main

def own() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def watch() -> None:
    global highest
    while True:
        highest = max(highest, own())
        time.sleep(0.002)

options = compose_export(sys.argv[1:])
before = highest = own()
threading.Thread(target=watch, daemon=True).start()
main(options)
print(highest - before)
"""


@pytest.mark.slow
def test_memory_is_a_slice_of_the_model_or_one_copy_if_checked(tmp_path):
    model = small_model("xlm-roberta")
    model.config |= {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 9, "num_attention_heads": 12}
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    options = [f"model.path={save_small(model, tmp_path / 'model')}", "model.pooling=mean", f"data.train=[{rows}]"]
    options += ["name=t", f"output_dir={tmp_path / 'run'}", "train.steps=1", "export.check=false"]
    subprocess.run([sys.executable, "-m", "embedtrain", *options], check=True, timeout=300)
    size = sum(t.nbytes for t in load_file(tmp_path / "run" / "model" / "model.safetensors").values())
    assert size > 200e6
    grown = {}
    for name, more in {
        "unchecked": ["check=false"],
        "bf16": ["check=false", "dtype=bf16"],
        "checked": ["check=true"],
        "onnx": ["formats=[onnx]"],
    }.items():
        command = [sys.executable, "-c", _MEASURED, f"run={tmp_path / 'run'}", f"output_dir={tmp_path / name}", *more]
        done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
        grown[name] = int(done.stdout.splitlines()[-1]) / size
    print({name: f"{share:.2f} of {size / 1e6:.0f} MB" for name, share in grown.items()})
    assert max(grown["unchecked"], grown["bf16"]) < 0.2
    assert grown["checked"] < 1.5
    assert grown["onnx"] < 3.0


def test_the_check_of_a_sparse_model_needs_the_logits_of_two_texts(tmp_path):
    words, length, kind = 30_000, 512, "sparse"
    model = small_model("bert", kind=kind, pooling=None)
    model.config |= {"vocab_size": words, "max_position_embeddings": length}
    path = save_language_model(model, tmp_path / "model")
    built = architecture_of(tmp_path / "architecture", model_options(path=str(path), kind=kind, max_length=length))
    export_model(tmp_path / "out", built, check=False)
    peaks: list[float] = []
    with memory_growth(peaks):
        load_kind(kind).files.of_sentence_transformers(tmp_path / "out", built.source, {}, length)
    logits = 4 * words * length / MB  # of the longest text
    assert logits < peaks[0] < 8 * logits
