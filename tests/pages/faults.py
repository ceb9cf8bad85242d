"""Processes that behave as PDFium may with damaged documents; they import this module alone, to start soon."""

import os
import signal
import time
from multiprocessing.connection import Connection


def serve_faults(connection: Connection) -> None:
    """A process in which documents crash and hang."""
    connection.send("ready")
    while True:
        what, path, number, _ = connection.recv()
        if path.name == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if path.name == "hangs":
            time.sleep(600)
        if path.name == "full":
            connection.send(OSError(28, "No space left on device"))
        connection.send((what, number))
