"""The libraries that are compared, with the script of each kind of model and the environment it runs in."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parents[1] / ".venv-rivals"
DENSE, RERANKER, LATE_INTERACTION, SPARSE = "dense", "reranker", "late_interaction", "sparse"
KINDS = (DENSE, RERANKER, LATE_INTERACTION, SPARSE)
OURS = "embedtrain"
# What is measured of sparse models beside nDCG@10: the mean number of words of a document that have a weight.
ACTIVE_WORDS = "active words"


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """One library.

    Attributes:
        name: name in tables, of its environment and of its requirements file.
        scripts: file in `scripts` by kind of model.
        trains_alike: whether its quality is compared; not if its loss has no counterpart in the others.
        launcher: `torchrun` starts the script once per rank; `python` starts it once, and it starts its ranks itself.
    """

    name: str
    scripts: Mapping[str, str]
    launcher: str = "torchrun"
    trains_alike: bool = True

    @property
    def bin(self) -> Path:
        """The directory of the environment's programs; ours is the one that measures."""
        return Path(sys.executable).parent if self.name == OURS else ENVIRONMENTS / self.name / "bin"

    @property
    def installed(self) -> bool:
        """Whether its environment exists."""
        return (self.bin / self.launcher).is_file()

    def command(self, kind: str, settings: Path, ranks: int) -> list[str]:
        """The command that trains."""
        script = str(FOLDER / "scripts" / self.scripts[kind])
        if self.launcher == "python":
            return [str(self.bin / "python"), script, str(settings)]
        return [str(self.bin / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), script, str(settings)]


def _scripts(library: str, *kinds: str) -> dict[str, str]:
    return {kind: f"{kind}_{library}.py" for kind in kinds}


LIBRARIES = {
    library.name: library
    for library in (
        Library(OURS, dict.fromkeys(KINDS, "embedtrain.py"), launcher="python"),
        Library("sentence-transformers", _scripts("sentence_transformers", *KINDS)),
        Library("FlagEmbedding", _scripts("FlagEmbedding", DENSE, RERANKER)),
        Library("tevatron", _scripts("tevatron", DENSE, RERANKER, SPARSE)),
        Library("pylate", _scripts("pylate", LATE_INTERACTION)),
        Library("lightning-ir", _scripts("lightning_ir", LATE_INTERACTION, SPARSE)),
        Library("angle-emb", _scripts("angle_emb", DENSE), trains_alike=False),
        Library("accelerate", _scripts("accelerate", DENSE, RERANKER)),
    )
}


def libraries_of(kind: str) -> list[Library]:
    """Those that train this kind, ours first."""
    return [library for library in LIBRARIES.values() if kind in library.scripts]
