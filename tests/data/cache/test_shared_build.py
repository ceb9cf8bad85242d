"""Folders that several processes build side by side: shared, taken over, refused, repaired, and never half trusted."""

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from embedtrain.data.cache.cache import Build, Task, build, is_complete, map_array, write_array
from embedtrain.errors import DataError
from tests.forked import fork_context
from tests.marks import slow_but

CONTEXT = fork_context()


def write(log: Path, seconds: float, path: Path) -> None:
    """A task: its result is its name; every run leaves a line in the log."""
    with log.open("a") as file:
        file.write(f"{path.name} {os.getpid()}\n")
    path.mkdir()
    time.sleep(seconds)
    (path / "a").write_text(path.name * 3)


def join(directory: Path, names: list[str], path: Path) -> None:
    path.mkdir()
    (path / "all").write_text(" ".join((directory / name / "a").read_text() for name in names))


def planned_build(directory: Path, log: Path, count: int = 8, seconds: float = 0.0, **options: Any) -> Build:
    names = [f"part-{i:03}" for i in range(count)]
    tasks: Mapping[str, Task] = {name: partial(write, log, seconds) for name in names}
    return Build(directory, lambda: tasks, partial(join, directory, names), **options)


def build_one(directory: Path, log: Path, count: int, seconds: float, keep: bool, barrier: Any = None) -> None:
    """Build a folder; with a barrier, only when all processes have started."""
    if barrier is not None:
        barrier.wait(60)
    build([planned_build(directory, log, count, seconds, keep=keep)])


def files(directory: Path) -> dict[str, str]:
    """All that is in a folder but for what only guards it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def runs(log: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def start(count: int, function: Callable[..., None], *args: Any) -> list[Any]:
    processes = [CONTEXT.Process(target=function, args=args) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.parametrize("keep", slow_but([True], [True, False]))
def test_processes_share_the_work_and_the_result_is_that_of_one(tmp_path: Path, keep: bool) -> None:
    build_one(tmp_path / "alone", tmp_path / "log", 8, 0.0, keep)
    barrier = CONTEXT.Barrier(3)
    processes = start(3, build_one, tmp_path / "shared", tmp_path / "log3", 8, 0.1, keep, barrier)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    assert (tmp_path / "shared" / "part-000").exists() == keep
    assert runs(tmp_path / "log3") == {f"part-{i:03}": 1 for i in range(8)}
    assert len({line.split()[1] for line in (tmp_path / "log3").read_text().splitlines()}) > 1
    assert is_complete(tmp_path / "shared")


@pytest.mark.slow
def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    build_one(tmp_path / "alone", tmp_path / "log", 12, 0.0, True)
    draw = random.Random(time.time())
    for number in range(3):
        directory, log = tmp_path / f"shared-{number}", tmp_path / f"log-{number}"
        processes = start(3, build_one, directory, log, 12, 0.06, True)
        while not log.exists():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))
        os.kill(processes[0].pid, signal.SIGKILL)
        for process in processes[1:]:
            process.join(60)
            assert process.exitcode == 0
        processes[0].join()
        assert files(directory) == files(tmp_path / "alone")


def test_finished_tasks_are_not_repeated_after_a_stop(tmp_path: Path) -> None:
    (process,) = start(1, build_one, tmp_path / "a", tmp_path / "log", 6, 0.1, True)
    while not (tmp_path / "a" / "part-002").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not is_complete(tmp_path / "a")
    build_one(tmp_path / "a", tmp_path / "log2", 6, 0.0, True)
    assert set(runs(tmp_path / "log2")) <= {f"part-{i:03}" for i in range(3, 6)}
    assert not list((tmp_path / "a").glob("unfinished*"))


def test_progress_is_reported_and_nothing_is_built_twice(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    counted = planned_build(
        tmp_path / "a", tmp_path / "log", 4, progress=lambda done, total: reported.append((done, total))
    )
    build([counted])
    assert reported == [(done, 4) for done in range(5)]
    build([counted])
    assert len(reported) == 5
    assert sum(runs(tmp_path / "log").values()) == 4


# What fails


def fail(log: Path, failing: tuple[int, ...], path: Path) -> None:
    with log.open("a") as file:
        file.write(f"{path.name} {os.getpid()}\n")
    time.sleep(0.02)
    if int(path.name[-3:]) in failing:
        raise DataError(f"{path.name} is bad")
    path.write_text("good")


def build_bad(directory: Path, log: Path, failing: tuple[int, ...]) -> None:
    tasks = {f"part-{i:03}": partial(fail, log, failing) for i in range(10)}
    try:
        build([Build(directory, lambda: tasks, lambda path: path.write_text("all"))])
    except DataError as error:
        (log.parent / f"error-{os.getpid()}").write_text(str(error))


def test_all_processes_raise_the_first_error(tmp_path: Path) -> None:
    for process in start(3, build_bad, tmp_path / "a", tmp_path / "log", (4, 5, 8)):
        process.join(60)
        assert process.exitcode == 0
    assert [path.read_text() for path in tmp_path.glob("error-*")] == ["part-004 is bad"] * 3
    build_bad(tmp_path / "a", tmp_path / "log2", ())  # what was wrong is mended, and the mark of the failure is no wall
    assert is_complete(tmp_path / "a")
    assert {"part-004", "part-005"} <= set(runs(tmp_path / "log2"))


def test_the_first_of_several_folders_fails_first(tmp_path: Path) -> None:
    def bad(name: str) -> Build:
        def task(path: Path) -> None:
            raise DataError(f"{name} is bad")

        return Build(tmp_path / name, lambda: {"part": task}, lambda path: None)

    with pytest.raises(DataError, match=r"^b is bad"):
        build([planned_build(tmp_path / "a", tmp_path / "log"), bad("b"), bad("c")])
    assert is_complete(tmp_path / "a")


def test_a_folder_is_built_while_other_processes_hold_the_last_tasks_of_another(tmp_path: Path) -> None:
    (tmp_path / "a" / "locks").mkdir(parents=True)
    builds = [planned_build(tmp_path / name, tmp_path / f"log-{name}", 2) for name in ("a", "b")]
    with FileLock(tmp_path / "a" / "locks" / "part-001.lock"):
        thread = threading.Thread(target=build, args=(builds,))
        thread.start()
        while not is_complete(tmp_path / "b"):
            time.sleep(0.01)
        assert not is_complete(tmp_path / "a")
    thread.join(10)
    assert is_complete(tmp_path / "a")


# What is damaged, or goes away


def cut_short(directory: Path) -> None:
    (directory / "part-001" / "a").write_text("p")


def delete_a_file(directory: Path) -> None:
    (directory / "joined" / "all").unlink()


def spoil_the_mark(directory: Path) -> None:
    (directory / "complete.json").write_text('{"files": 3')


def delete_the_mark(directory: Path) -> None:
    (directory / "complete.json").unlink()


@pytest.mark.parametrize("damage", [cut_short, delete_a_file, spoil_the_mark, delete_the_mark])
def test_damaged_results_are_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    build_one(tmp_path / "a", tmp_path / "log", 3, 0.0, True)
    whole = files(tmp_path / "a")
    damage(tmp_path / "a")
    assert not is_complete(tmp_path / "a")
    build_one(tmp_path / "a", tmp_path / "log", 3, 0.0, True)
    assert is_complete(tmp_path / "a")
    assert files(tmp_path / "a") == whole


def test_a_folder_that_is_deleted_while_it_is_built(tmp_path: Path) -> None:
    deletions = iter(range(100))

    def build_and_delete(times: int) -> None:
        def task(path: Path) -> None:
            write(tmp_path / "log", 0.0, path)
            if next(deletions) < times:
                shutil.rmtree(tmp_path / "a")

        names = ["part-0", "part-1"]
        build([Build(tmp_path / "a", lambda: dict.fromkeys(names, task), partial(join, tmp_path / "a", names))])

    build_and_delete(2)
    assert is_complete(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(DataError, match="cache while it is being built") as caught:
        build_and_delete(99)
    assert "\n" not in str(caught.value)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("in the way")
    for directory in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(DataError, match="cannot be cached here") as caught:
            build([planned_build(directory, tmp_path / "log")])
        assert str(caught.value).startswith(f"{directory}: ")
        assert "data.cache_dir or $EMBEDTRAIN_CACHE" in str(caught.value)


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        build([planned_build(Path("/proc/nope/rows"), tmp_path / "log")])
    assert str(caught.value) == (
        "/proc/nope: this folder cannot be made to cache the training data in (No such file or directory): "
        "set data.cache_dir or $EMBEDTRAIN_CACHE to a folder that can be written"
    )


def test_a_full_disk(small_disk: Path) -> None:
    def task(path: Path) -> None:
        path.write_bytes(b"x" * 400_000)

    names = [f"part-{i}" for i in range(4)]
    with pytest.raises(DataError, match=r" 0\.\d MB free.* data\.cache_dir") as caught:
        build([Build(small_disk / "a", lambda: dict.fromkeys(names, task), lambda path: None)])
    assert str(caught.value).startswith(f"{small_disk / 'a'}: ")
    assert "data.cache_dir or $EMBEDTRAIN_CACHE" in str(caught.value)
    left = sorted(path for path in small_disk.rglob("part-?") if path.is_file() and path.stat().st_size)
    assert [path.name for path in left] == ["part-0", "part-1"]


# Arrays


@pytest.mark.parametrize("count", [0, 5, 100_000])
def test_arrays_are_read_only_and_outlive_their_file(tmp_path: Path, count: int) -> None:
    import numpy as np

    values = np.arange(count, dtype=np.int64)
    write_array(tmp_path / "a.bin", values)
    opened = map_array(tmp_path / "a.bin", np.int64)
    (tmp_path / "a.bin").unlink()
    assert np.array_equal(opened, values)
    assert not opened.flags.writeable
