"""Atomic writes, and writing without following links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from embedtrain.cli.entry import set_home
from embedtrain.data.cache.cache import cache_directory
from embedtrain.data.sources.files import local_path
from embedtrain.errors import ConfigError
from embedtrain.utils.files import (
    atomic_write,
    expand_user,
    has_home,
    make_folder,
    open_append,
    remove_tree,
    temporary_home,
)
from tests.conftest import ROOT


@pytest.mark.parametrize("durable", [False, True])
def test_the_content_is_replaced_when_the_block_ends(tmp_path, durable):
    path = tmp_path / "folder" / "file.json"
    for content in ("old", "new"):
        before = path.read_text() if path.exists() else None
        with atomic_write(path, durable=durable) as temporary:
            temporary.write_text(content)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_content(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file.json"
    for make_link in (path.symlink_to, path.hardlink_to):
        victim.write_text("untouched")
        make_link(victim)
        with atomic_write(path) as temporary:
            temporary.write_text("new")
        assert (victim.read_text(), path.read_text()) == ("untouched", "new")
        assert not path.is_symlink()
        path.unlink()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_new_files_have_the_mode_of_the_umask(tmp_path, umask):
    previous = os.umask(umask)
    try:
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text("new")
        with open_append(tmp_path / "log") as file:
            file.write(b"row")
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_only_temporary_files_of_ended_processes_are_removed(tmp_path):
    program = """if True:
        import sys, time
        from pathlib import Path
        from embedtrain.utils.files import atomic_write
        with atomic_write(Path(sys.argv[1])) as temporary:
            temporary.write_text("half")
            print(temporary, flush=True)
            time.sleep(600)
    """
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / name)], stdout=subprocess.PIPE, text=True)
        for name in ("killed", "running")
    ]
    temporaries = [Path(writer.stdout.readline().strip()) for writer in writers if writer.stdout]
    writers[0].kill()
    writers[0].wait()
    kept = [tmp_path / ".file.json.tmp", tmp_path / ".embedtrain-notes.tmp", tmp_path / f".embedtrain-{'0' * 16}.tmp"]
    for path in kept[:2]:
        path.write_text("of the user")
    kept[2].symlink_to(kept[0])
    with atomic_write(tmp_path / "file.json") as temporary:
        temporary.write_text("new")
    assert not temporaries[0].exists()
    assert temporaries[1].read_text() == "half"
    assert all(path.is_symlink() or path.read_text() == "of the user" for path in kept)
    writers[1].kill()
    writers[1].wait()


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to", "mkfifo", "mkdir"])
def test_nothing_is_appended_through_links_or_to_pipes(tmp_path, kind):
    victim, path = tmp_path / "victim", tmp_path / "metrics.jsonl"
    victim.write_text("untouched")
    if kind == "mkfifo":
        os.mkfifo(path)
    elif kind == "mkdir":
        path.mkdir()
    else:
        getattr(path, kind)(victim)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        open_append(path)
    assert victim.read_text() == "untouched"


def test_folders_are_neither_created_nor_deleted_through_links(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    link.symlink_to(victim)
    with pytest.raises(ConfigError, match="link"):
        make_folder(link)
    remove_tree(link)
    assert not link.is_symlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(victim)
    remove_tree(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert (victim / "file").read_text() == "untouched"


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """A user without HOME and without an entry in passwd."""

    def no_entry(_: int) -> None:
        raise KeyError

    for name in ("HOME", "EMBEDTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"embedtrain-{os.getuid()}"


def test_a_user_without_a_home_directory(no_home):
    assert not has_home()
    assert expand_user("~/rows.jsonl") == Path("~/rows.jsonl")
    set_home()
    assert Path(os.environ["HOME"]) == no_home == temporary_home()
    assert no_home.stat().st_mode & 0o777 == 0o700
    assert not has_home(), "other hosts do not see a temporary one"
    assert expand_user("~/rows.jsonl") == no_home / "rows.jsonl"
    assert cache_directory(None) == no_home / "cache"


def test_a_folder_of_somebody_else_is_no_home_directory(no_home):
    no_home.mkdir(mode=0o777)
    no_home.chmod(0o777)
    assert temporary_home() != no_home
    assert temporary_home().stat().st_mode & 0o077 == 0


def test_a_tilde_that_begins_a_file_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("~x.jsonl").write_text("{}")
    assert expand_user("~x.jsonl").is_file()
    assert local_path("~x.jsonl") == "~x.jsonl"


def test_paths_are_expanded_by_functions_that_do_not_raise():
    """`Path.expanduser` and `Path.home` raise where there is no home directory, and for `~x.jsonl`."""
    used = [
        path.relative_to(ROOT)
        for path in (ROOT / "embedtrain").rglob("*.py")
        if re.search(r"(?<!os\.path)\.expanduser\(|\bPath\.home\(", path.read_text(encoding="utf-8"))
    ]
    assert used == []
