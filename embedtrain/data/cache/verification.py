"""Verification of large cached folders in a thread, while the run starts: the ranks of a host share the files."""

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from embedtrain.errors import DataError
from embedtrain.utils.checksums import Block, Checksums

COMPLETE = "complete.json"  # the checksums of all files of a folder, written when it is complete
# Bytes of a folder that every process verifies before it opens the folder: at most half a second.
VERIFIED_BYTES = 1 << 30


class Verification:
    """Verifies what `shared_build.is_complete` does not: the blocks of folders beyond VERIFIED_BYTES.

    This process verifies every `local_size`-th of them.
    """

    def __init__(self, local_rank: int = 0, local_size: int = 1) -> None:
        self._local_rank, self._local_size = local_rank, local_size
        self._pending: deque[tuple[Path, Checksums, Block]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # None: nothing is pending
        self._error: Exception | None = None

    def add(self, directory: Path) -> None:
        """Verify the rest of a complete folder."""
        try:
            checksums = Checksums.read(directory / COMPLETE)
        except (OSError, ValueError):  # opening the folder reports it
            return
        blocks = checksums.split(VERIFIED_BYTES)[1][self._local_rank :: self._local_size]
        with self._lock:  # a thread that is past its last block takes no more
            self._pending.extend((directory, checksums, block) for block in blocks)
            if self._pending and self._thread is None:
                # A daemon, so that a run which fails ends without waiting for it.
                self._thread = threading.Thread(target=self._verify, name="verification", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise DataError if a damaged file was detected, or why none is; callable from any thread."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all files are verified; raises as `check`."""
        thread = self._thread
        if thread is not None:
            thread.join()
        self.check()

    def _verify(self) -> None:
        try:
            while (block := self._next()) is not None:
                self._verify_block(*block)
        except Exception as error:  # nothing would be verified any more
            self._error = error

    def _next(self) -> tuple[Path, Checksums, Block] | None:
        with self._lock:
            if not self._pending:
                self._thread = None
                return None
            return self._pending.popleft()

    @staticmethod
    def _verify_block(directory: Path, checksums: Checksums, block: Block) -> None:
        if not checksums.is_intact(directory, block):
            with suppress(OSError):  # makes the next start verify every result, and build damaged ones again
                (directory / COMPLETE).unlink()
            raise DataError(
                f"{directory / block[0]} is damaged in the cache: start the same command again, and it is built again"
            )
