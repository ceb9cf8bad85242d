"""Limits of the process (`ulimit`): the error of an exhausted one names it. Real limits, set in this process."""

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.utils.limits import explain_limits, raise_open_files, report_low_limits


@contextlib.contextmanager
def limited(number: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(number)
    resource.setrlimit(number, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(number, (soft, hard))


def test_open_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.touch()
    message = r"Too many open files.*open files 200 \(ulimit -n\)"
    limit = limited(resource.RLIMIT_NOFILE, 200)
    with limit, contextlib.ExitStack() as files, pytest.raises(EmbedtrainError, match=message), explain_limits():
        for _ in range(200):
            files.enter_context(path.open())


def test_size_of_a_file(tmp_path):
    message = r"size of a file 1\.0 KB \(ulimit -f\)"
    with limited(resource.RLIMIT_FSIZE, 1000), pytest.raises(EmbedtrainError, match=message), explain_limits():
        (tmp_path / "weights").write_bytes(bytes(2000))


def test_address_space():
    limit = limited(resource.RLIMIT_AS, psutil.Process().memory_info().vms + (100 << 20))
    with limit, pytest.raises(EmbedtrainError, match=r"\(ulimit -v\)"), explain_limits():
        np.ones(1 << 30)


def raise_from_os_error(path: Path) -> None:
    try:
        raise OSError(errno.EMFILE, "Too many open files", str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read") from error


def test_an_error_for_the_user_keeps_its_type_and_text(tmp_path):
    with limited(resource.RLIMIT_NOFILE, 300):
        with pytest.raises(DataError, match=r"rows cannot be read; .*open files 300 \(ulimit -n\)"), explain_limits():
            raise_from_os_error(tmp_path / "rows")
        with pytest.raises(KeyError), explain_limits():
            raise KeyError("rows")


def test_low_limits_are_raised_or_reported_once_per_host(capfd, monkeypatch):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with limited(resource.RLIMIT_NOFILE, 64):
        report_low_limits()
        assert "open files 64 (ulimit -n)" in capfd.readouterr().err
        monkeypatch.setenv("LOCAL_RANK", "1")
        report_low_limits()
        assert not capfd.readouterr().err
        monkeypatch.delenv("LOCAL_RANK")
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(4096, hard)
        report_low_limits()
        assert "ulimit -n" not in capfd.readouterr().err
