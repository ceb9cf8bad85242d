"""Atomic writes."""

import pytest

from embedtrain.files import atomic_write


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
