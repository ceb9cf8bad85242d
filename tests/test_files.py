"""Atomic writes, and writing without following links."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embedtrain.errors import ConfigError
from embedtrain.files import atomic_write, make_folder, open_append, remove_tree


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
        from embedtrain.files import atomic_write
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
