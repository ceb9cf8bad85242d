"""Ranks agree, and fail together."""

import socket
import time

import pytest

from embedtrain.distributed.world import World, explain_lost_contact, joined_world
from embedtrain.errors import ConfigError, DataError, EmbedtrainError, FailedElsewhere, LostContact


def caught(world: World, failures: dict[int, Exception]) -> tuple[str, str]:
    """Class and text of what this rank raises when the ranks named in `failures` fail in a phase."""
    try:
        with world.fail_together("counting sheep"):
            if world.rank in failures:
                raise failures[world.rank]
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def agreement(world: World) -> list[tuple[str, str]]:
    assert world.broadcast({"rank": world.rank, "text": "ä" * 5000}) == {"rank": 0, "text": "ä" * 5000}
    assert world.gather((world.rank, "x" * world.rank)) == [(rank, "x" * rank) for rank in range(world.size)]
    world.barrier()
    began = time.monotonic()
    answers = [
        caught(world, {}),
        caught(world, {world.size - 1: DataError("no sheep")}),
        caught(world, {rank: ConfigError("wolves") for rank in range(world.size)}),
        caught(world, {0: OSError("disk full"), world.size - 1: DataError("no sheep")}),
        caught(world, {rank: ValueError(f"sheep {rank}") for rank in range(world.size)}),
    ]
    assert time.monotonic() - began < 10
    world.barrier()  # and the ranks are still in step
    return answers


@pytest.mark.parametrize("world_size", [2, 3])
def test_failing_together(ranks, world_size):
    answers = ranks(world_size, agreement)
    last = world_size - 1
    for rank, (fine, one, alike, two, each) in enumerate(answers):
        assert fine == ("", "")
        elsewhere = ("FailedElsewhere", f"rank {last} failed while counting sheep: DataError: no sheep")
        assert one == (("DataError", "no sheep") if rank == last else elsewhere)
        # What all ranks say alike is said once.
        follows = ("FailedElsewhere", "rank 0 failed while counting sheep: ConfigError: wolves")
        assert alike == (("ConfigError", "wolves") if rank == 0 else follows)
        follows = ("FailedElsewhere", "rank 0 failed while counting sheep: OSError: disk full")
        assert two == {0: ("OSError", "disk full"), last: ("DataError", "no sheep")}.get(rank, follows)
        assert each == ("ValueError", f"sheep {rank}")


def test_all_failures_are_of_the_users_tree():
    assert issubclass(FailedElsewhere, EmbedtrainError)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_world_of_one(no_launcher):
    for _ in range(2):  # and it can be left and joined again
        with joined_world(30.0) as world:
            assert (world.rank, world.size, world.is_main) == (0, 1, True)
            assert world.gather("x") == ["x"]
            assert world.broadcast("x") == "x"
            with pytest.raises(DataError, match="no sheep"), world.fail_together("counting sheep"):
                raise DataError("no sheep")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "1"}, "WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "would train alone"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    ],
)
def test_a_launcher_that_contradicts_itself(no_launcher, variables, words):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    with pytest.raises(ConfigError, match=words), joined_world(5.0):
        pass


@pytest.mark.parametrize(
    ("said", "reason"),
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
def test_another_rank_is_gone(said, reason):
    with pytest.raises(LostContact) as caught, explain_lost_contact("evaluating dev"):
        raise RuntimeError(said)
    assert str(caught.value) == (
        f"lost contact with another rank while evaluating dev: it ended or stopped answering ({reason}); "
        f"its own output says why"
    )


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError("mat1 and mat2 cannot be multiplied"), DataError("Connection closed by peer")):
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
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use by another program"), joined_world(5.0):
            pass
