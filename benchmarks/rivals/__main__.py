"""Measure the tables that are not measured yet, and write all into a Markdown file.

make rivals                                        everything, with the environments of the libraries
python -m benchmarks.rivals gradients              one table
python -m benchmarks.rivals quality --kinds dense --libraries embedtrain accelerate

Each training is stored when it ends: run the command again, and it continues.
"""

import argparse
import json
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

TABLES = {
    "quality": "Quality, speed and memory",
    "recommended": "3,072 rows with nothing but the data",
    "gradients": "The gradient of a batch of 16 rows over several ranks",
    "failures": "A killed rank, another number of ranks, a full disk",
}
OUTPUT = Path("runs/rivals")


def main(arguments: list[str]) -> None:
    from benchmarks.rivals.libraries import KINDS, LIBRARIES
    from benchmarks.rivals.settings import SEEDS, Settings

    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="default: all")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory of everything that is measured")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument(
        "--model", help="a sentence-transformers directory of a BERT, of which every second layer is used"
    )
    parser.add_argument("--train", type=Path, help="JSONL rows with query, pos and neg")
    parser.add_argument("--in-domain", type=Path, nargs="+", help="evaluation sets in BEIR's layout")
    parser.add_argument("--out-of-domain", type=Path, nargs="+", default=[], help="further sets, beside library-docs")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of every training; on GPUs, one for each")
    parser.add_argument("--epochs", type=int, default=1, help="of `recommended`")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ("model", "train") if getattr(options, name)}
    if options.in_domain:
        given["in_domain"] = tuple(path.resolve() for path in options.in_domain)
    settings = Settings(
        output=options.output.resolve(),
        libraries=tuple(options.libraries),
        kinds=tuple(options.kinds),
        out_of_domain=tuple(path.resolve() for path in options.out_of_domain),
        seeds=tuple(options.seeds),
        ranks=options.ranks,
        epochs=options.epochs,
        **given,
    )
    settings.output.mkdir(parents=True, exist_ok=True)
    sections = [_header(settings)]
    for name in options.tables or TABLES:
        sections.append(f"## {TABLES[name]}\n\n{import_module(f'benchmarks.rivals.{name}').measure(settings)}")
        print(sections[-1], flush=True)
    if not options.tables:
        from benchmarks.rivals.quality import summary

        (settings.output / "tables.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
        (settings.output / "results.json").write_text(json.dumps(summary(settings), indent=1) + "\n", encoding="utf-8")
        print(f"tables.md and results.json are in {settings.output}")


def _header(settings: "Settings") -> str:  # noqa: F821
    from benchmarks.measure import machine
    from benchmarks.rivals.libraries import LIBRARIES

    absent = [name for name in settings.libraries if not LIBRARIES[name].installed]
    note = f"\n\nNot installed: {', '.join(absent)}." if absent else ""
    return f"{machine()}; {settings.ranks} ranks{note}"


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
