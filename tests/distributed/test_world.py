"""Ranks exchange small objects and fail together."""

import os
import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.commands.doctor.host import listening_ports
from embedtrain.distributed import world as world_module
from embedtrain.distributed.watchdog.watchdog import GRACE, MAX_FINISHING, OBSERVATION
from embedtrain.distributed.world import (
    NCCL_ERROR_HANDLING,
    World,
    explain_lost_contact,
    init_process_group,
    joined_world,
    nccl_error,
)
from embedtrain.errors import ConfigError, DataError, EmbedtrainError, FailedElsewhere, LostContact


def error_of(world: World, failures: dict[int, Exception]) -> tuple[str, str]:
    """Type and text of the error on this rank if the ranks in `failures` fail in a phase."""
    try:
        with world.fail_together("counting sheep"):
            if world.rank in failures:
                raise failures[world.rank]
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def exchange_and_fail(world: World) -> list[tuple[str, str]]:
    assert world.broadcast({"rank": world.rank, "text": "ä" * 5000}) == {"rank": 0, "text": "ä" * 5000}
    assert world.gather((world.rank, "x" * world.rank)) == [(rank, "x" * rank) for rank in range(world.size)]
    world.barrier()
    started = time.monotonic()
    errors = [
        error_of(world, {}),
        error_of(world, {world.size - 1: DataError("no sheep")}),
        error_of(world, {rank: ConfigError("wolves") for rank in range(world.size)}),
        error_of(world, {0: OSError("disk full"), world.size - 1: DataError("no sheep")}),
        error_of(world, {rank: ValueError(f"sheep {rank}") for rank in range(world.size)}),
    ]
    assert time.monotonic() - started < 30  # the time-out of the tests' ranks is 60 s
    world.barrier()  # the ranks are still in sync
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_fail_with_the_first_error(ranks, world_size):
    results = ranks(world_size, exchange_and_fail)
    last = world_size - 1
    for rank, (none, last_fails, equal_errors, two_errors, different_errors) in enumerate(results):
        assert none == ("", "")
        elsewhere = ("FailedElsewhere", f"rank {last} failed while counting sheep: DataError: no sheep")
        assert last_fails == (("DataError", "no sheep") if rank == last else elsewhere)
        # An error that all ranks share is reported once.
        follows = ("FailedElsewhere", "rank 0 failed while counting sheep: ConfigError: wolves")
        assert equal_errors == (("ConfigError", "wolves") if rank == 0 else follows)
        follows = ("FailedElsewhere", "rank 0 failed while counting sheep: OSError: disk full")
        assert two_errors == {0: ("OSError", "disk full"), last: ("DataError", "no sheep")}.get(rank, follows)
        assert different_errors == ("ValueError", f"sheep {rank}")


class HostReads(TorchDispatchMode):
    """Counts the values that are read from a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


def reads_at_a_barrier(world: World) -> int:
    with HostReads() as reads:
        world.barrier()
    return reads.count


def test_a_barrier_reads_its_result(ranks):
    """A collective of NCCL makes the stream wait for the other ranks; a process waits when it reads the result."""
    assert ranks(2, reads_at_a_barrier) == [1, 1]


def test_a_failure_elsewhere_is_a_user_error():
    assert issubclass(FailedElsewhere, EmbedtrainError)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # that a world of one host sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_world_of_one(no_launcher):
    for _ in range(2):  # it can be left and joined again
        with joined_world(30.0) as world:
            assert (world.rank, world.size, world.is_main) == (0, 1, True)
            assert world.gather("x") == ["x"]
            assert world.broadcast("x") == "x"
            with pytest.raises(DataError, match="no sheep"), world.fail_together("counting sheep"):
                raise DataError("no sheep")


def test_ranks_of_one_host_listen_on_loopback_only(no_launcher):
    """gloo and the store that rank 0 hosts; torch's defaults are the host's own address, and all interfaces."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in launched.items():
        no_launcher.setenv(name, value)
    before = set(listening_ports(psutil.Process(), ""))
    with joined_world(30.0) as world:
        assert world.gather("x") == ["x"]
        ports = set(listening_ports(psutil.Process(), "")) - before
    assert len(ports) >= 2
    assert port in {listening.number for listening in ports}
    assert {listening.address for listening in ports} == {"127.0.0.1"}


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "1"}, "WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "would train alone"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        # As mpirun or a script starts them: each would take the first GPU of its host.
        (LAUNCHED, r"RANK=1 and WORLD_SIZE=4 but LOCAL_RANK and LOCAL_WORLD_SIZE missing"),
        (LAUNCHED | {"LOCAL_RANK": "1"}, r"but LOCAL_WORLD_SIZE missing"),
        (LAUNCHED | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict"),
        (LAUNCHED | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, r"or RANK=1 and WORLD_SIZE=4"),
    ],
)
def test_contradicting_variables_of_a_launcher(no_launcher, variables, message):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    with pytest.raises(ConfigError, match=message), joined_world(5.0):
        pass


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:3441", "Connection closed by peer"),
        ("[pair.cc:538] Read error [127.0.0.1]:62: Connection reset by peer", "Connection reset by peer"),
        ("[unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete", "Timed out waiting 8000ms"),
        ("NCCL communicator was aborted on rank 1.", "NCCL communicator was aborted"),
        (
            "ncclRemoteError: A call failed possibly due to a network error",
            "ncclRemoteError",
        ),
    ],
)
def test_errors_of_a_lost_rank_are_explained(raised, reason):
    with pytest.raises(LostContact) as caught, explain_lost_contact("evaluating dev"):
        raise RuntimeError(raised)
    assert "while evaluating dev" in str(caught.value)
    assert f"({reason})" in str(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 cannot be multiplied"), DataError("Connection closed by peer")]
)
def test_other_errors_are_unchanged(error):
    with pytest.raises(type(error)) as caught, explain_lost_contact("evaluating dev"):
        raise error
    assert caught.value is error


def test_a_port_that_is_taken(no_launcher):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            no_launcher.setenv(name, value)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*MASTER_PORT"), joined_world(5.0):
            pass


@pytest.mark.parametrize(
    ("version", "variables", "value"),
    [
        ("2.11.0", {}, "3"),
        ("2.14.1", {}, "3"),
        ("2.14.1", {"TORCH_DIST_USE_NCCL2": "1"}, "0"),
        ("2.15.0", {}, "0"),
        ("2.15.0", {"TORCH_DIST_USE_NCCL2": "0"}, "3"),
    ],
)
def test_nccl_leaves_the_end_of_the_process_to_the_watchdog(monkeypatch, version, variables, value):
    """Unless the user has set a value. A group with NCCL is bound to its device; torch's call is stubbed."""
    created = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: created.append((backend, options)))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    patience = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    for name in (NCCL_ERROR_HANDLING, *patience):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, given in variables.items():
        monkeypatch.setenv(name, given)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    store = dist.HashStore()
    init_process_group(store, 0, 1, cpu, "gloo")
    assert NCCL_ERROR_HANDLING not in os.environ
    init_process_group(store, 0, 1, gpu, "cpu:gloo,cuda:nccl", timeout=7.0)
    assert os.environ[NCCL_ERROR_HANDLING] == value
    dump, heartbeat = (int(os.environ[name]) for name in patience)
    assert min(4 * dump / 1000, heartbeat) > MAX_FINISHING + GRACE + OBSERVATION
    for name in (NCCL_ERROR_HANDLING, *patience):
        monkeypatch.setenv(name, "1")
    init_process_group(store, 0, 1, gpu, "cpu:gloo,cuda:nccl")
    assert {os.environ[name] for name in (NCCL_ERROR_HANDLING, *patience)} == {"1"}
    assert [(backend, options["device_id"]) for backend, options in created] == [
        ("gloo", None), ("cpu:gloo,cuda:nccl", gpu), ("cpu:gloo,cuda:nccl", gpu),
    ]  # fmt: skip
    assert created[1][1]["timeout"] == timedelta(seconds=7)


class Communicator:
    """What `get_error` of a process group's backend returns or raises; None: the backend has no such function."""

    def __init__(self, answer: str | Exception | None) -> None:
        self.answer = answer
        if answer is not None:
            self.get_error = self._get_error

    def _get_error(self) -> SimpleNamespace:
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(name=self.answer)


@pytest.mark.parametrize(
    ("backends", "error"),
    [
        ([Communicator("SUCCESS"), Communicator("REMOTE_ERROR")], "NCCL: REMOTE_ERROR"),
        ([Communicator(RuntimeError("destroyed")), Communicator("TIMEOUT")], "NCCL: TIMEOUT"),
        ([Communicator(None), Communicator("COMM_ERROR")], "NCCL: COMM_ERROR"),
        ([SimpleNamespace(wrapped_pg=Communicator("COMM_ERROR"))], "NCCL: COMM_ERROR"),
        ([Communicator(TypeError("another interface"))], ""),
        ([Communicator(None)], ""),
    ],
)
def test_the_watchdog_does_not_depend_on_what_implements_nccl(monkeypatch, backends, error):
    """It asks in a thread whose end would end the process. What it asks is stubbed: there is no NCCL here."""
    groups = [SimpleNamespace(_get_backend=lambda device, backend=backend: backend) for backend in backends]
    monkeypatch.setattr(world_module, "process_groups", lambda: groups)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert nccl_error() == error
