"""Measure the tables that are not stored yet, each in a process of its own, and store each when it is done.

python -m benchmarks.gpu                 all tables; run again, it continues
python -m benchmarks.gpu search          this table, stored or not
python -m benchmarks.gpu --small         all tables with tiny models on any device, printed and not stored
"""

import argparse
import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

MODELS = ("XLM-R-large", "Qwen3-0.6B", "Qwen3-4B")
OTHER_KINDS = ("XLM-R-large reranker", "XLM-R-base ColBERT", "BERT-base SPLADE")
# Each must be measured within LIMIT seconds: module and argument of its `measure`.
TABLES = {
    **{f"training:{model}": ("benchmarks.gpu.training", model) for model in (*MODELS, *OTHER_KINDS)},
    **{f"theirs:{model}": ("benchmarks.gpu.theirs", model) for model in MODELS},
    "losses": ("benchmarks.losses", ""),
    "losses:million": ("benchmarks.losses", "million"),
    "encoding": ("benchmarks.gpu.inference", "encoding"),
    "search": ("benchmarks.gpu.inference", "search"),
    "plan": ("benchmarks.plan", ""),
    "checkpoints": ("benchmarks.gpu.checkpoints", ""),
}
LIMIT = 600
FOLDER = Path(__file__).parent
_MARK = re.compile(r"^<!-- table: (.+?) -->$", re.MULTILINE)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; default: those not stored")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device; nothing is stored")
    options = parser.parse_args(arguments)
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"there is no table {', '.join(unknown)}; available: {', '.join(TABLES)}")
    set_environment()
    import torch

    if options.small:
        for name in options.tables or TABLES:
            print(section(name, measure(name, small=True)), flush=True)
        return 0
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --small runs everything with tiny models")
    path = FOLDER / f"{re.sub('[^A-Za-z0-9]+', '-', torch.cuda.get_device_name())}.md"
    if len(options.tables) == 1:
        store(path, options.tables[0], measure(options.tables[0]))
        return 0
    return 1 if measure_in_processes(options.tables or missing(path)) else 0


def measure_in_processes(names: list[str]) -> list[str]:
    """Measure and store tables one by one; returns the names of those that failed."""
    failed = []
    for name in names:
        print(f"{name} ...", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "benchmarks.gpu", name], timeout=LIMIT, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            print(f"{name} failed: {error}", flush=True)
    return failed


def measure(name: str, *, small: bool = False) -> tuple[str, str]:
    """The title and the table."""
    module, argument = TABLES[name]
    imported = import_module(module)
    table: str = imported.measure(argument, small=small)
    return f"{imported.TITLE} ({name})" if argument else imported.TITLE, table


def section(name: str, measured: tuple[str, str]) -> str:
    title, table = measured
    return f"<!-- table: {name} -->\n\n## {title}\n\n{table}\n"


def stored(path: Path) -> dict[str, str]:
    """The sections of a file by the names of their tables."""
    if not path.is_file():
        return {}
    _, *parts = _MARK.split(path.read_text())
    return {name: f"<!-- table: {name} -->{text}" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def missing(path: Path) -> list[str]:
    """The tables that the file does not have."""
    return [name for name in TABLES if name not in stored(path)]


def store(path: Path, name: str, measured: tuple[str, str]) -> None:
    """Add a table to the file, or replace it; tables keep the order of TABLES."""
    from benchmarks.measure import machine

    sections = stored(path) | {name: section(name, measured)}
    texts = [sections[table].strip() + "\n" for table in TABLES if table in sections]
    written = path.with_suffix(".tmp")
    written.write_text("\n".join([f"# {path.stem}\n", f"{machine()}\n", *texts]))
    written.replace(path)


def set_environment() -> None:
    """Set what must be set before torch is imported."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    warnings.filterwarnings("ignore")

    import torch

    from embedtrain.inference.loading.load import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
