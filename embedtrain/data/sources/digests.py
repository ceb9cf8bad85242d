"""What a file holds, told by a short digest: equal for equal content, wherever it lies."""

import hashlib
import os
from typing import Any

from embedtrain.data.sources.remote import info_of, is_url
from embedtrain.data.sources.streams import BLOCK, open_plain
from embedtrain.errors import DataError

WHOLE_BYTES = 64 * BLOCK  # a file of at most so many is read whole
NUM_SAMPLES = 16  # blocks looked at between the first and the last of a larger one
# What file systems say of a file's version, by the names that fsspec's implementations give it.
_VERSIONS = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "content_md5",
    "checksum",
    "sha256",
    "oid",
    "blob_id",
    "version_id",
    "VersionId",
    "generation",
    "last_commit",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "mtime",
    "modified",
    "created",
)


def file_digest(name: str) -> str:
    """A hexadecimal digest of a file's content.

    Up to 64 MiB are read whole (BLAKE2b). Of a larger file size, time of change, and 18 blocks of 1 MiB count.
    Under a URL what the file system says of the file counts: size, checksum, date.

    Raises:
        DataError: the file is gone or cannot be read.
    """
    return _digest_of_url(name) if is_url(name) else _digest_of_path(name)


def _digest_of_path(name: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_plain(name) as file:
        try:
            status = os.fstat(file.fileno())
            if status.st_size <= WHOLE_BYTES:
                while block := file.read(BLOCK):
                    digest.update(block)
                return digest.hexdigest()
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            last = status.st_size - BLOCK
            for i in range(NUM_SAMPLES + 2):
                file.seek(last * i // (NUM_SAMPLES + 1))
                digest.update(file.read(BLOCK))
            return digest.hexdigest()
        except OSError as error:
            raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error


def _digest_of_url(url: str) -> str:
    info: dict[str, Any] = info_of(url)
    said = {key: str(info[key]) for key in _VERSIONS if info.get(key) is not None}
    # Without any of these a file that is replaced by one of the same size would pass for the same.
    told = {"size": info.get("size"), **said} if said else {key: str(info[key]) for key in sorted(info)}
    return hashlib.blake2b(repr(sorted(told.items())).encode(), digest_size=16).hexdigest()
