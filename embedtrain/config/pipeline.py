"""The options of a pipeline: a recipe with `kind: pipeline`, whose stages are commands."""

from dataclasses import dataclass, field
from typing import Any

PIPELINE = "pipeline"  # value of `kind`


@dataclass(kw_only=True)
class PipelineConfig:
    """A recipe of several stages, which run one after the other and resume as one."""

    name: str = ""  # name of the pipeline
    kind: str = PIPELINE  # pipeline: distinguishes it from the recipe of one training
    output_dir: str = "runs/${name}"  # directory of the pipeline; stages write to stages/ in it
    shared: dict[str, Any] = field(default_factory=dict)  # values that stages refer to, such as ${shared.model}
    # Stages by name, in the order in which they run: `do` is the command, the other keys are its options.
    stages: dict[str, Any] = field(default_factory=dict)
    # Measures models after stages: `after`, names of stages, and options of evaluate, such as sets.
    evaluation: dict[str, Any] = field(default_factory=dict)
    timeout: float = 1800.0  # seconds that a rank waits for the others, except for rank 0 in stages that it runs alone
