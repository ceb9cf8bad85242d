"""Ranks exchange small objects and fail together."""

import socket
import time

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.commands.doctor.host import listening_ports
from embedtrain.distributed.world import World, explain_lost_contact, joined_world
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
    assert time.monotonic() - started < 10
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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "1"}, "WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "would train alone"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
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
