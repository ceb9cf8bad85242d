"""Run the benchmarks and print each Markdown table as soon as it is measured."""

import os
import sys
import warnings
from importlib import import_module

TABLES = (
    "training",
    "caching",
    "encoding",
    "pictures",
    "picture_steps",
    "graphs",
    "reranking",
    "collectives",
    "scaling",
    "evaluation",
    "losses",
    "late_interaction",
    "sparse",
    "data",
    "checkpoints",
    "plan",
    "memory_traffic",
    "startup",
)
# Slow; page_steps needs colpali-engine, data_memory and scale a lot of disk space as well, defaults other data sets.
ON_DEMAND = ("page_steps", "data_memory", "pipeline_ablation", "synthetic_rows", "scale", "many_ranks", "defaults")


def main() -> None:
    selected = sys.argv[1:] or TABLES
    unknown = [name for name in selected if name not in TABLES + ON_DEMAND]
    if unknown:
        sys.exit(f"there is no table {unknown[0]}; available: {', '.join(TABLES + ON_DEMAND)}")
    # Set before torch is imported. With more threads than free cores, threads wait for each other and distort timings.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore")

    import torch

    from benchmarks.measure import machine
    from embedtrain.inference.loading.load import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    print(machine(), flush=True)
    for name in selected:
        module = import_module(f"benchmarks.{name}")
        print(f"\n## {module.TITLE}\n\n{module.measure()}", flush=True)


if __name__ == "__main__":
    main()
