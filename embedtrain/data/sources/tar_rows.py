"""Rows of tar files in the layout of webdataset, as img2dataset writes them: `KEY.jpg`, `KEY.txt` and `KEY.json`."""

import tarfile
from collections.abc import Iterator
from typing import IO, Any

from embedtrain.data.sources.files import MAX_LINE_BYTES, is_url, open_binary
from embedtrain.data.sources.text_rows import RawRow, parse_json_row
from embedtrain.data.sources.values import BadRow, TarMember, describe_error, not_utf8, shorten
from embedtrain.errors import DataError
from embedtrain.utils.formatting import format_bytes

_PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")


def tar_rows(name: str) -> Iterator[RawRow]:
    """A row for each sample: its `image`, as the place in the tar file; its `caption`, KEY.txt; the fields of KEY.json.

    Members of one sample follow each other. Only headers and texts are read. Raises DataError if the file is no tar
    file, is cut off, or is under a URL.
    """
    if is_url(name):
        raise DataError(f"{name}: pictures in a tar file under a URL cannot be read one by one: download it")
    number = 0
    try:
        with open_binary(name) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            members: dict[str, tarfile.TarInfo] = {}
            before = None
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # which would hold every header of the file
                if member.isdir():
                    continue
                folder, slash, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                key = folder + slash + stem
                if before is not None and key != before:
                    number += 1
                    yield number, _row(name, file, before, members)
                    members = {}
                before, members[kind.lower()] = key, member
            if before is not None:
                yield number + 1, _row(name, file, before, members)
    except DataError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{name}: after row {number:,}: cannot be read as a tar file: {describe_error(error)}"
        ) from None


def _row(name: str, file: IO[bytes], key: str, members: dict[str, tarfile.TarInfo]) -> dict[str, Any] | BadRow:
    try:
        row: dict[str, Any] = {}
        if "json" in members:
            fields = parse_json_row(_text(file, members["json"]).encode())
            if isinstance(fields, BadRow):
                raise BadRow(f"KEY.json of the sample {shorten(key)}: {fields}")
            row = fields
        if row.get("status", "success") != "success":
            raise BadRow(f"the sample {shorten(key)} has the status {shorten(row['status'])}, not success")
        if "txt" in members:
            row["caption"] = _text(file, members["txt"])
        pictures = [kind for kind in members if kind.rpartition(".")[2] in _PICTURES]
        for kind in pictures:
            member = members[kind]
            if not member.isreg() or member.issparse():
                raise BadRow(f"{shorten(member.name)} is a link or a device, not a file")
            row["image" if len(pictures) == 1 else f"{kind.rpartition('.')[0] or kind}_image"] = TarMember(
                name, member.offset_data, member.size, member.name
            )
        return row
    except BadRow as bad:
        return bad


def _text(file: IO[bytes], member: tarfile.TarInfo) -> str:
    if not member.isreg() or member.size > MAX_LINE_BYTES:
        raise BadRow(f"{shorten(member.name)} is no file, or has more than {format_bytes(MAX_LINE_BYTES)}")
    position = file.tell()
    file.seek(member.offset_data)
    data = file.read(member.size)
    file.seek(position)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"{shorten(member.name)}: {not_utf8(data, error.start)}") from None
