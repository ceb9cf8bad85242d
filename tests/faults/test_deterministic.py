"""`parallel.deterministic` uses torch's deterministic algorithms, which compute the same bits on a CPU."""

import pytest

from tests.faults.hooks import PrintDeterminism
from tests.faults.runs import start, training_result


@pytest.mark.slow
def test_deterministic_algorithms_change_nothing_on_a_cpu(folder, undisturbed):
    run = start(folder, "deterministic", "parallel.deterministic=true", hook=PrintDeterminism())
    assert run.wait() == [0, 0], run.text
    assert run.text.count("deterministic=True") == 2 * 12
    assert "deterministic=False" not in run.text
    assert training_result(folder / "deterministic") == undisturbed
