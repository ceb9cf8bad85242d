"""Starts the ranks of this node with torch's elastic agent, as torchrun does, and returns the command's exit code.

It differs from torchrun in what users notice: one store without pickles, which on a single node listens on loopback
only; no traceback after the error that a rank has reported; signals are forwarded, and the ranks have as much time as
they need to save a checkpoint; the exit code is that of the ranks.
"""

import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from embedtrain.config.launch import Launch
from embedtrain.distributed.signals import StopSignals, exit_code
from embedtrain.distributed.srun import interface_for
from embedtrain.distributed.world import listen
from embedtrain.errors import ConfigError, LaunchError
from embedtrain.utils.formatting import format_count

# Within this time all nodes must have started the command, as with torchrun.
_RENDEZVOUS_MINUTES = 15
_LOOPBACK = "127.0.0.1"
_MONITOR_SECONDS = 0.1


def run_ranks(module: str, arguments: Sequence[str], launch: Launch, num_local_ranks: int) -> int:
    """Run `python -P -m MODULE ARGUMENTS` on `num_local_ranks` ranks of this node; returns the exit code.

    It is that of the rank that ended first with an error: 0, 1, 75 or 130. A rank that a signal has ended without this
    process having forwarded one is reported, and the exit code is 1.

    Raises:
        ConfigError: the address of node 0 cannot be used.
        LaunchError: the other nodes did not start in time.
    """
    signals = _ForwardedSignals()
    signals.listen()
    if "LOGLEVEL" not in os.environ:  # the ranks and this function report what the agent would log
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    # The other signals are forwarded by the thread, also while the main thread waits for other nodes in C++.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    spec = WorkerSpec(
        role="default",
        local_world_size=num_local_ranks,
        entrypoint=sys.executable,
        args=("-P", "-u", "-m", module, *arguments),
        rdzv_handler=_rendezvous(launch),
        max_restarts=launch.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
    )
    agent = _Agent(spec, DefaultLogsSpecs(log_dir=os.devnull))
    signals.agent = agent
    try:
        result = agent.run()
    except SignalException as error:
        return 128 + error.sigval
    return 1 if result is None else _exit_code(result, signals.received, is_reported=agent.has_reporting_rank())


class _Agent(LocalElasticAgent):
    def give_up_restarts(self) -> None:
        self._remaining_restarts = 0  # torch's agent does the same (2.11 to 2.15)

    def has_reporting_rank(self) -> bool:
        """Whether a rank has ended with an error, which it has printed; a rank that a signal ended prints nothing."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})  # of torch 2.11 to 2.15
        return any(handler.proc.returncode == 1 for handler in handlers.values())


class _ForwardedSignals(StopSignals):
    """Sends the signals of this process to its ranks; before there are any, a signal ends it."""

    agent: _Agent | None = None

    def _handle(self, received: signal.Signals) -> None:
        self.received = self.received or received
        ranks = psutil.Process().children()
        if self.agent is None:
            self._exit()
            return
        if not ranks:  # they have not been started, or all have ended
            os._exit(exit_code(received))
        self.agent.give_up_restarts()
        for rank in ranks:
            try:
                rank.send_signal(received)
            except psutil.NoSuchProcess:
                continue


class _Rendezvous(StaticTCPRendezvous):
    """The static rendezvous, which exchanges no pickles, on a store that is already open."""

    def __init__(self, store: Store, launch: Launch, host: str, port: int) -> None:
        super().__init__(host, port, launch.node_rank, launch.nodes, f"embedtrain-{uuid4()}", timeout=0)
        if launch.nodes > 1:
            self.run_id = "embedtrain"  # the same on all nodes
        self._opened = store

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._opened), self.rank, self.world_size, address)


def _rendezvous(launch: Launch) -> _Rendezvous:
    """Open the store that all nodes share: node 0 listens, the others connect."""
    is_one_node = launch.nodes == 1
    host, port = (_LOOPBACK, 0) if is_one_node else (launch.host, launch.port)
    name = f"--master {host}:{port}"
    if not is_one_node:
        _set_interface(host)
        others = format_count(launch.nodes - 1, "other node")
        print(f"node {launch.node_rank}: waiting for {others} at {host}:{port}", file=sys.stderr, flush=True)
    listener = listen(host, port, is_one_host=is_one_node) if launch.node_rank == 0 else None
    if listener is not None:
        port = listener.getsockname()[1]
    elif is_one_node:
        raise LaunchError(f"no port of {host} can be opened")
    try:
        store = TCPStore(
            host,
            port,
            launch.nodes,
            is_master=launch.node_rank == 0,
            timeout=timedelta(minutes=_RENDEZVOUS_MINUTES),
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"{name} is in use by another program: choose another port") from error
        raise LaunchError(
            f"{name}: the {launch.nodes} nodes did not meet within {_RENDEZVOUS_MINUTES} minutes "
            f"({str(error).splitlines()[0][:200]}): start the same command on every node, each with its --node-rank, "
            "and let the nodes reach this port"
        ) from error
    return _Rendezvous(store, launch, host, port)


def _set_interface(host: str) -> None:
    """Have gloo use the interface that leads to node 0, or has its address, unless the environment names one."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"--master {host}: {error.strerror or error}") from None
    interface = None if ipaddress.ip_address(str(address).partition("%")[0]).is_loopback else interface_for(host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _exit_code(result: RunResult, received: signal.Signals | None, *, is_reported: bool) -> int:
    if not result.is_failed():
        return 0
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode >= 0:
        return failure.exitcode
    if received is not None:
        return exit_code(received)
    name = signal.Signals(-failure.exitcode).name
    hint = ": the memory of this node may be exhausted, see `dmesg`" if name == "SIGKILL" else ""
    print(
        # The cause of the error of another rank, which has noticed that this one has ended, is no second error.
        f"{'' if is_reported else 'error: '}{name} ended rank {rank} (process {failure.pid} on "
        f"{socket.gethostname()}){hint}",
        file=sys.stderr,
        flush=True,
    )
    return 1
