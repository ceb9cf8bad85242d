"""Ranks are killed at random, again and again, in one run: the result is that of a run without faults."""

import random
import signal
import time

import pytest

from tests.faults.runs import finish, start, training_result


@pytest.mark.slow  # one kill at a time: test_killed.py
@pytest.mark.parametrize(("kills", "steps"), [(4, 12), (20, 40)])
def test_random_kills(folder, kills, steps, capsys):
    generator = random.Random(f"chaos {kills}")
    out, moments = f"chaos-{kills}", []
    length = f"train.steps={steps}"
    finish(folder, f"calm-{kills}", length)
    while len(moments) < kills:
        run = start(folder, out, length, f"checkpoint.every={generator.choice([1, 2])}")
        rank, ahead = generator.randrange(2), run.last_step + generator.randint(1, 3)
        # Also during start-up, and after the last step during evaluation and export.
        while ahead <= steps and any(process.is_alive() for process in run.processes) and run.last_step < ahead:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.3 if ahead <= steps else 3.0))
        if all(process.is_alive() for process in run.processes):
            moments.append((rank, run.last_step))
            run.send(signal.SIGKILL, rank)
        codes = run.wait(launcher=True)
        assert len(run.errors) <= 1, run.text
        assert set(codes) <= {0, 1, 75, -signal.SIGKILL}, run.text
    finish(folder, out, length)
    with capsys.disabled():
        print(f"\nkilled (rank, last logged step): {moments}")
    assert training_result(folder / out) == training_result(folder / f"calm-{kills}")
