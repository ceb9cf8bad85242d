"""Garbage is collected at steps that are due, and at no other time."""

import gc
import weakref

import pytest

from embedtrain.training.loop import automatic_collection, scheduled_collection


class Cycle:
    """A large object that references itself."""

    def __init__(self) -> None:
        self.myself = self
        self.memory = bytearray(1000)


@pytest.fixture(autouse=True)
def nothing_frozen():
    """As in a process that runs no tests: see tests/conftest.py."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def collections():
    """Generations that were collected, in order."""
    generations = []

    def record(phase, info):
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(record)
    yield generations
    gc.callbacks.remove(record)


def test_cycles_are_freed_between_steps_only(collections):
    references = []
    with scheduled_collection(every=3) as garbage:
        for step in range(1, 10):
            collections.clear()
            cycles = [Cycle() for _ in range(3000)]  # enough for several automatic collections
            references.append(weakref.ref(cycles[0]))
            del cycles
            assert not collections, "collected within the step"
            garbage.collect_after(step)
            assert collections == ([2] if step % 3 == 0 else [])
            alive = [number for number, reference in enumerate(references, start=1) if reference() is not None]
            assert alive == list(range(step - step % 3 + 1, step + 1))


def test_earlier_objects_are_traversed_once():
    earlier = [[i] for i in range(1000)]
    with scheduled_collection(every=1) as garbage:
        garbage.collect_after(1)
        assert gc.get_freeze_count() > len(earlier)
        tracked = len(gc.get_objects())
        garbage.collect_after(2)
        assert len(gc.get_objects()) <= tracked + 100
    assert gc.get_freeze_count() == 0


@pytest.mark.quick("True")
@pytest.mark.parametrize("enabled", [True, False])
def test_the_previous_state_is_restored_after_an_error(enabled):
    try:
        if not enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError), scheduled_collection(every=1) as garbage:
            garbage.collect_after(1)
            assert not gc.isenabled()
            with automatic_collection():
                assert gc.isenabled()
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
        with automatic_collection():
            assert gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_objects_frozen_by_the_caller_stay_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with scheduled_collection(every=1) as garbage:
            garbage.collect_after(1)
        # Objects whose last reference disappears leave the frozen set; none joins it.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
