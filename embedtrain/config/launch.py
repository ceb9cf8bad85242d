"""The options of the launcher, `--gpus` and others, which start the ranks of a command; imports no torch."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from embedtrain.errors import ConfigError

AUTO = "auto"
DEFAULT_PORT = 29500  # torchrun's
HELP = """  --gpus N            one rank on each of N GPUs (default: all visible ones)
  --nproc-per-node N  N ranks on this node, also on the CPU
  --nodes N --node-rank I --master HOST[:PORT]
                      several nodes: run the same command on each, I from 0
  --max-restarts N    restarts of all ranks after a failure (default: 0)"""
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class Launch:
    """How many ranks to start on this node, and where the nodes meet.

    Attributes:
        gpus: ranks on GPUs of this node; 0 means as many as there are visible GPUs.
        processes: ranks of this node whatever their device; None if `gpus` decides.
        nodes: number of nodes.
        node_rank: number of this node.
        host: name or address of node 0; empty for one node.
        port: of node 0.
        max_restarts: of all ranks after a failure.
    """

    gpus: int = 0
    processes: int | None = None
    nodes: int = 1
    node_rank: int = 0
    host: str = ""
    port: int = DEFAULT_PORT
    max_restarts: int = 0


def split_launch_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Launch | None, list[str]]:
    """The launcher's options, and the other arguments in their order.

    The first is None if there are no such options, or if this process is a rank that another launcher has started.

    Raises:
        ConfigError: a value that cannot work, or options in a rank, except `--gpus=auto`.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus")
    parser.add_argument("--nproc-per-node", "--nproc_per_node")
    parser.add_argument("--nodes", "--nnodes")
    parser.add_argument("--node-rank", "--node_rank")
    parser.add_argument("--master")
    parser.add_argument("--max-restarts", "--max_restarts")
    options, others = parser.parse_known_args(arguments)
    values = {name: value for name, value in vars(options).items() if value is not None}
    if "RANK" in environment:
        used = [name for name, value in values.items() if (name, value) != ("gpus", AUTO)]
        if used:
            raise ConfigError(
                f"{_flag(used[0])} {values[used[0]]}: a launcher (torchrun, accelerate or srun) has already started "
                f"this process as rank {environment['RANK']}: leave it out"
            )
        return None, others
    return (_launch(values) if values else None), others


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _launch(values: Mapping[str, str]) -> Launch:
    if "nproc_per_node" in values and values.get("gpus", AUTO) != AUTO:
        raise ConfigError("--gpus and --nproc-per-node both set the number of ranks: write one of them")
    gpus = values.get("gpus", AUTO)
    nodes = _number(values, "nodes", 1, minimum=1)
    node_rank = _number(values, "node_rank", 0, minimum=0)
    launch = Launch(
        gpus=0 if gpus == AUTO else _number(values, "gpus", 0, minimum=1),
        processes=_number(values, "nproc_per_node", 0, minimum=1) if "nproc_per_node" in values else None,
        nodes=nodes,
        node_rank=node_rank,
        max_restarts=_number(values, "max_restarts", 0, minimum=0),
    )
    if nodes == 1:
        # A template for any number of nodes writes `--nodes 1 --node-rank 0 --master HOST`.
        surplus = [name for name in ("node_rank", "master") if name in values]
        if surplus and (node_rank or "nodes" not in values):
            raise ConfigError(
                f"{_flag(surplus[0])} {values[surplus[0]]} is for several nodes: add --nodes N, or leave it out"
            )
        return launch
    if missing := [name for name in ("node_rank", "master") if name not in values]:
        raise ConfigError(
            f"--nodes {nodes}: {' and '.join(map(_flag, missing))} missing: run the same command on every node, with "
            f"--node-rank 0 to {nodes - 1} and --master HOST[:PORT], the address of node 0"
        )
    if node_rank >= nodes:
        raise ConfigError(f"--node-rank {node_rank}: --nodes {nodes} are numbered from 0 to {nodes - 1}")
    match = _ADDRESS.fullmatch(values["master"])
    if match is None or int(match["port"] or DEFAULT_PORT) > 65535:
        raise ConfigError(f"--master {values['master']}: write HOST or HOST:PORT, such as 10.0.0.1:29500")
    port = int(match["port"] or DEFAULT_PORT)
    return Launch(launch.gpus, launch.processes, nodes, node_rank, match["host"].strip("[]"), port, launch.max_restarts)


def _number(values: Mapping[str, str], name: str, default: int, *, minimum: int) -> int:
    text = values.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not text.isascii() or not minimum <= int(text) <= 1_000_000:
        selects = "; CUDA_VISIBLE_DEVICES selects GPUs" if name == "gpus" else ""
        raise ConfigError(f"{_flag(name)} {text}: must be a number of at least {minimum}{selects}")
    return int(text)
