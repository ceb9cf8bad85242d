"""A rank for tests of the launcher: `python -m tests.distributed.launched_rank MODE`, without torch."""

import os
import signal
import sys
import time
from pathlib import Path

from embedtrain.distributed.signals import EXIT_INTERRUPTED, EXIT_TRY_AGAIN

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "GROUP_RANK")


def write_line(text: str) -> None:
    """In one call: unbuffered, `print` writes the newline separately, and the lines of two ranks mix."""
    os.write(1, f"{text}\n".encode())


def main(mode: str) -> int:
    rank = os.environ["RANK"]
    if mode == "environment":
        write_line(" ".join(os.environ.get(name, "") for name in NAMES))
    elif mode == "wait":  # until a signal, then for longer than the launcher takes to notice an ended rank
        codes = {signal.SIGTERM: EXIT_TRY_AGAIN, signal.SIGUSR1: EXIT_TRY_AGAIN, signal.SIGINT: EXIT_INTERRUPTED}
        received = signal.SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, codes)
        Path(f"ready-{rank}").touch()
        received = signal.sigwait(codes)
        time.sleep(0.5)
        write_line(f"rank {rank} has saved")
        return codes[received]
    elif mode == "fail" and rank == "1":
        print("error: rank 1 has failed", file=sys.stderr, flush=True)
        return 1
    elif mode == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "noticed":  # one is killed, and the other reports that
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigwait([signal.SIGTERM])
        print("error: rank 1 ended while training", file=sys.stderr, flush=True)
        return 1
    elif mode == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
