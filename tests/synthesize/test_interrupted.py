"""Commands that are killed or stopped while they ask: what they have paid for is used, and nothing is asked twice."""

import random
import resource
import signal
import time
from collections import Counter

import pytest

from embedtrain.errors import EmbedtrainError
from tests.marks import slow_but
from tests.synthesize.asking import RESULT, interrupt, result, start, start_command
from tests.synthesize.scripted import about, write_corpus
from tests.synthesize.stub_server import Fault, Stub
from tests.synthesize.test_asker import ask, expected, requests, single, texts, writer
from tests.synthesize.test_command import answer


def until(condition, asking, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert any(one.is_alive() for one in asking.processes), asking.text
        assert time.monotonic() < deadline, asking.text
        time.sleep(0.002)


def slowly(body, number):
    return Fault(seconds=0.03)


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_are_killed_at_random(tmp_path, kills):
    """The replies are those of an undisturbed run. Only requests that were in flight are sent twice, and all count."""
    count, concurrency = 40 * kills, 4
    generator = random.Random(f"kills {kills}")
    with Stub(fault=slowly) as stub:
        config = writer(stub, concurrency=concurrency)
        calm = start(tmp_path / "calm", config, 2, count, 10)
        assert calm.wait() == [0, 0], calm.text
        assert len(stub.bodies) == count
    with Stub(fault=slowly) as stub:
        config = writer(stub, concurrency=concurrency)
        for kill in range(kills):
            asking = start(tmp_path / "killed", config, 2, count, 10)
            moment = len(stub.bodies) + generator.randint(3, 20)
            until(lambda moment=moment: len(stub.bodies) >= moment, asking)
            interrupt(asking, signal.SIGKILL, *([0, 1] if kill == 1 else [generator.randrange(2)]))
            assert -signal.SIGKILL in asking.wait(), asking.text
            assert "Traceback" not in asking.text
            assert not (tmp_path / "killed" / RESULT).exists()
        asking = start(tmp_path / "killed", config, 3, count, 10)
        assert asking.wait() == [0, 0, 0], asking.text
        after, before = result(tmp_path / "killed"), result(tmp_path / "calm")
        assert after["replies"] == before["replies"]
        times = Counter(stub.asked)
        assert len(times) == count
        assert len(stub.bodies) - count <= kills * concurrency
        # A request whose line was written when its process was killed may not have been sent.
        assert len(stub.bodies) <= after["requests"] <= len(stub.bodies) + kills * concurrency


@pytest.mark.slow  # of replies instead of rows: above
def test_the_command_is_killed_three_times_at_random(tmp_path):
    """The rows are those of an undisturbed run, and only requests in flight at a kill are sent twice."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(60)])
    options = [f"corpus={corpus}", "writer.backend=api", "writer.model=m", "writer.concurrency=4"]
    options += ["checks.languages=false", "checks.judge.min_grade=2", "paraphrase=0.3"]
    generator = random.Random("command")
    with Stub(answer, slowly) as stub:
        url, out = f"writer.url={stub.url}", tmp_path / "calm"
        calm = start_command(tmp_path, 2, "synthesize", *options, url, f"output_dir={out}")
        assert calm.wait(180.0) == [0, 0], calm.text
        num_requests, rows = len(stub.bodies), (out / "rows.jsonl").read_bytes()
    with Stub(answer, slowly) as stub:
        out = tmp_path / "killed"
        options += [f"writer.url={stub.url}", f"output_dir={out}", f"max_requests={num_requests + 12}"]
        for _ in range(3):
            asking = start_command(tmp_path, 2, "synthesize", *options)
            moment = len(stub.bodies) + generator.randint(3, num_requests // 5)
            until(lambda moment=moment: len(stub.bodies) >= moment, asking)
            interrupt(asking, signal.SIGKILL, generator.randrange(2))
            assert -signal.SIGKILL in asking.wait(), asking.text
            assert "Traceback" not in asking.text
            assert not (out / "rows.jsonl").exists()
        asking = start_command(tmp_path, 3, "synthesize", *options)
        assert asking.wait(180.0) == [0, 0, 0], asking.text
        assert (out / "rows.jsonl").read_bytes() == rows
        assert num_requests <= len(stub.bodies) <= num_requests + 12


@pytest.mark.slow  # over several runs: test_asker.py
def test_a_budget_holds_over_kills(tmp_path):
    with Stub(fault=slowly) as stub:
        config = writer(stub)
        asking = start(tmp_path, config, 2, 60, 20, 25)
        until(lambda: len(stub.bodies) >= 10, asking)
        interrupt(asking, signal.SIGKILL, 0, 1)
        asking.wait()
        asking = start(tmp_path, config, 2, 60, 20, 25)
        assert asking.wait() == [0, 0], asking.text
        assert 20 < len(stub.bodies) <= result(tmp_path)["requests"] == 25


@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_lets_requests_in_flight_end(tmp_path, number):
    with Stub(fault=lambda body, number: Fault(seconds=0.3)) as stub:
        config = writer(stub)
        asking = start(tmp_path, config, 2, 30, 30)
        until(lambda: len(stub.bodies) >= 6, asking)
        interrupt(asking, number)
        code = 130 if number is signal.SIGINT else 75
        assert asking.wait() == [code, code], asking.text
        assert f"{number.name}: stopping after the requests in flight" in asking.text
        assert f"stopped by {number.name}: the same command continues" in asking.text
        assert 6 <= len(stub.bodies) < 30
        stub.fault = lambda body, number: None
        asking = start(tmp_path, config, 1, 30, 30)
        assert asking.wait() == [0], asking.text
        assert len(stub.bodies) == len(set(stub.asked)) == result(tmp_path)["requests"] == 30


def test_a_disk_that_is_full_ends_the_command(tmp_path):
    """In a sentence. The answers before it are kept, and the line that was cut off is not."""
    with Stub() as stub:
        config, (soft, hard) = writer(stub, concurrency=1), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        try:
            with pytest.raises(EmbedtrainError, match="asking the language model failed: File too large"):
                single(ask, tmp_path, config, requests(30))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sent = len(stub.bodies)
        assert 2 < sent < 30
        assert (tmp_path / "answers" / "00000.jsonl").stat().st_size == 3000
        replies, _, _ = single(ask, tmp_path, config, requests(30))
        assert texts(replies) == expected(stub, requests(30))
        assert len(stub.bodies) <= 31


def test_a_file_that_is_a_link_is_not_written_to(tmp_path):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "00001.jsonl").symlink_to(tmp_path / "other")
    with Stub() as stub:
        asking = start(tmp_path, writer(stub), 2, 30, 30)
        assert asking.wait() == [1, 1], asking.text
        assert "is a link" in asking.text
        assert not stub.bodies
