"""When Python collects garbage: at steps that are due, and at no other moment."""

import gc
import weakref

import pytest

from embedtrain.training.garbage import automatic_collection, scheduled_collection


class Cycle:
    """An object that holds itself, and no small one."""

    def __init__(self) -> None:
        self.myself = self
        self.memory = bytearray(1000)


@pytest.fixture
def collections():
    """Generations that were collected, as they are."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_nothing_is_collected_within_steps_and_cycles_are_freed_between_them(collections):
    held = []
    with scheduled_collection(every=3) as garbage:
        for step in range(1, 10):
            collections.clear()
            cycles = [Cycle() for _ in range(3000)]  # enough for Python to begin by itself several times
            held.append(weakref.ref(cycles[0]))
            del cycles
            assert not collections, "within the step"
            garbage.after(step)
            assert collections == ([2] if step % 3 == 0 else [])
            alive = [at for at, one in enumerate(held, start=1) if one() is not None]
            assert alive == list(range(step - step % 3 + 1, step + 1))


def test_what_was_there_before_is_not_looked_through_again():
    before = [[i] for i in range(1000)]
    with scheduled_collection(every=1) as garbage:
        garbage.after(1)
        assert gc.get_freeze_count() > len(before)
        left = len(gc.get_objects())
        garbage.after(2)
        assert len(gc.get_objects()) <= left + 100
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("was_on", [True, False])
def test_afterwards_it_is_as_before_whatever_happens(was_on):
    try:
        if not was_on:
            gc.disable()
        with pytest.raises(ZeroDivisionError), scheduled_collection(every=1) as garbage:
            garbage.after(1)
            assert not gc.isenabled()
            with automatic_collection():
                assert gc.isenabled()
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is was_on
        assert gc.get_freeze_count() == 0
        with automatic_collection():
            assert gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


def test_what_somebody_else_has_set_aside_stays_so():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with scheduled_collection(every=1) as garbage:
            garbage.after(1)
        # An object that is freed by its last reference leaves; none joins.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
