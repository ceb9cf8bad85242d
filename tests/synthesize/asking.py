"""A command that asks a server, as processes that can be killed: forked, with the environment of torchrun."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

import embedtrain.__main__
from embedtrain.cli.entry import run_command
from embedtrain.commands.synthesize import api
from embedtrain.commands.synthesize.answers import open_answers
from embedtrain.commands.synthesize.asker import open_asker
from embedtrain.commands.synthesize.types import Message, Request, WriterConfig
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import joined_world
from embedtrain.utils.files import atomic_write
from tests.forked import fork_context, torchrun_environment

RESULT = "replies.json"


def blocks(count: int, size: int) -> list[list[Request]]:
    """Requests, the last of each block also in the next."""
    asked = [
        Request(messages=(Message("user", f"text {i}"),), purpose="queries", max_new_tokens=9, temperature=1.0, seed=i)
        for i in range(count)
    ]
    return [asked[max(0, start - 1) : start + size] for start in range(0, count, size)]


@dataclass
class Asking:
    """The ranks."""

    processes: list[Any]
    log: Path
    store: TCPStore

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, timeout: float = 90.0) -> list[int]:
        """Exit codes, after all have ended, or were ended as by a launcher when one had failed."""
        deadline = time.monotonic() + timeout
        while any(one.is_alive() for one in self.processes) and time.monotonic() < deadline:
            if any(one.exitcode for one in self.processes):
                break
            time.sleep(0.01)
        for one in self.processes:
            one.join(max(0.1, min(20.0, deadline - time.monotonic())))
            if one.is_alive():
                one.kill()
                one.join()
        return [one.exitcode for one in self.processes]


def start(folder: Path, config: WriterConfig, size: int, count: int, block: int, *limits: int | None) -> Asking:
    """Ask `count` requests in blocks; rank 0 writes RESULT at the end."""
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{time.monotonic_ns()}.log"
    processes = []
    for rank in range(size):
        environment = torchrun_environment(rank, size, store.port)
        process = fork_context().Process(
            target=_run, args=(environment, log, folder, config, count, block, limits), daemon=True
        )
        process.start()
        processes.append(process)
    return Asking(processes, log, store)


def _run(
    environment: dict[str, str], log: Path, folder: Path, config: WriterConfig, count: int, block: int, limits: Any
):
    _redirect(environment, log)
    signals = StopSignals()

    def ask(_: None) -> None:
        with joined_world() as world, open_answers(folder, world, **dict(zip(LIMITS, limits, strict=False))) as answers:
            asker = open_asker(config, answers, signals=signals)
            replies = [str(reply) for asked in blocks(count, block) for reply in asker.ask(asked)]
            if world.is_main:
                with atomic_write(folder / RESULT) as path:
                    path.write_text(json.dumps({"replies": replies, **asker.usage()}))
            else:
                asker.usage()

    run_command(lambda _: signals.listen(), ask)


def start_command(folder: Path, size: int, *arguments: str) -> Asking:
    """`embedtrain ARGUMENTS` on several ranks."""
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
    log = folder / f"{time.monotonic_ns()}.log"
    processes = [
        fork_context().Process(
            target=_run_command, args=(torchrun_environment(rank, size, store.port), log, arguments), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return Asking(processes, log, store)


def _run_command(environment: dict[str, str], log: Path, arguments: tuple[str, ...]) -> None:
    _redirect(environment, log)
    sys.argv = ["embedtrain", *arguments]
    embedtrain.__main__.main()


def _redirect(environment: dict[str, str], log: Path) -> None:
    os.setsid()
    os.environ.update(environment)
    api._FIRST_WAIT = 0.01
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)


LIMITS = ("max_requests", "max_tokens")


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return content


def interrupt(asking: Asking, which: signal.Signals, *ranks: int) -> None:
    for rank in ranks or range(len(asking.processes)):
        os.kill(asking.processes[rank].pid, which)
