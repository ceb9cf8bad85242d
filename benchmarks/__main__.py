"""Run the benchmarks and print each Markdown table as soon as it is table."""

import os
import sys
import warnings
from importlib import import_module

TABLES = (
    "training",
    "caching",
    "encoding",
    "collectives",
    "scaling",
    "evaluation",
    "losses",
    "data",
    "checkpoints",
    "plan",
    "gpu",
    "gpu_theirs",
)
ON_DEMAND = ("data_memory",)  # slow, and needs a lot of disk space


def main() -> None:
    selected = [name.partition(":") for name in sys.argv[1:] or TABLES]  # gpu:Qwen3-4B selects one model of that table
    unknown = [name for name, _, _ in selected if name not in TABLES + ON_DEMAND]
    if unknown:
        sys.exit(f"there is no table {unknown[0]}; available: {', '.join(TABLES + ON_DEMAND)}")
    # Set before torch is imported. With more threads than free cores, threads wait for each other and distort timings.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore")

    import torch

    from benchmarks.measure import machine
    from embedtrain.loading.load import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    print(machine(), flush=True)
    for name, _, part in selected:
        module = import_module(f"benchmarks.{name}")
        table = module.measure(part) if part else module.measure()
        print(f"\n## {module.TITLE}\n\n{table}", flush=True)


if __name__ == "__main__":
    main()
