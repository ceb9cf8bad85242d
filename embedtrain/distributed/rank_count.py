"""How many ranks the launcher starts on this node; imports torch only to ask a driver for its GPUs."""

import os

from embedtrain.config.launch import Launch
from embedtrain.errors import ConfigError
from embedtrain.formatting import format_count


def num_ranks(launch: Launch) -> int:
    """The number of ranks of this node."""
    if launch.processes is not None:
        return launch.processes
    visible = num_visible_gpus()
    if launch.gpus > visible:
        raise ConfigError(
            f"--gpus {launch.gpus}: this node has {format_count(visible, 'visible GPU')}"
            + ("" if visible else f"; --nproc-per-node {launch.gpus} starts ranks on the CPU")
        )
    return launch.gpus or max(1, visible)


def num_visible_gpus() -> int:
    """The number of GPUs that torch sees; without a driver it is not asked, because importing it takes seconds."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd"))):
        return 0
    import torch

    return torch.cuda.device_count()
