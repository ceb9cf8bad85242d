"""Which start of all ranks this is: they agree on it over a store that may know of earlier ones.

torchrun keeps its store when it starts all ranks again, and the ranks before them have left their words there. Its
count of restarts (TORCHELASTIC_RESTART_COUNT) cannot tell them apart: every host counts for itself, and a host that
starts its ranks again because those of another one have failed does not count that (torch 2.13). Ranks that took it for
the name of their attempt found the failure that ended the last one, and ended as well.
"""

import socket
import time
import uuid
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from embedtrain.distributed.watchdog.peers import format_ranks
from embedtrain.errors import LostContact

_POLL = 0.05  # seconds


def agree_on_attempt(store: Store, rank: int, size: int, timeout: float) -> str:
    """A name that the processes of this attempt have in common, and no others. Every rank must call it.

    A rank says that it is there, under a name of its own; the first rank answers each one that it has not answered yet,
    until all ranks have heard it. Of an earlier attempt no rank is left to hear it, for a launcher ends all before it
    starts any.

    Args:
        store: that all ranks have in common.
        rank: this one.
        size: how many there are.
        timeout: seconds that ranks wait for each other.

    Raises:
        LostContact: ranks did not come in time.
    """
    me = uuid.uuid4().hex
    if rank:
        store.set(f"attempt/of/{rank}", me)
        try:
            store.wait([f"attempt/for/{me}"], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise _late("rank 0", rank, timeout) from error
        token = store.get(f"attempt/for/{me}").decode()
        store.set(f"attempt/heard/{token}/{rank}", "")
        return token
    waited_for, answered, until = set(range(1, size)), set[str](), time.monotonic() + timeout
    while waited_for:
        for other in sorted(waited_for):
            if store.check([f"attempt/heard/{me}/{other}"]):
                waited_for.discard(other)
            elif store.check([f"attempt/of/{other}"]):
                its = store.get(f"attempt/of/{other}").decode()
                if its not in answered:
                    store.set(f"attempt/for/{its}", me)
                    answered.add(its)
        if waited_for and time.monotonic() > until:
            raise _late(format_ranks(sorted(waited_for)), rank, timeout)
        time.sleep(_POLL)
    return me


def _late(who: str, rank: int, timeout: float) -> LostContact:
    me = f"rank {rank} on {socket.gethostname()}"
    says = f"{me} has waited for {who} for {timeout:.0f} s while meeting the others: their own output says why"
    return LostContact(f"{who} did not come", said=says)
