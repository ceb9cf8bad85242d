"""Commands as functions of a program that continues afterwards: a notebook, a test, a script under torchrun."""

import atexit
import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from transformers.utils import logging as transformers_logging

from embedtrain.cli.entry import ignore_accelerate_environment
from embedtrain.config.hydra_files import own_hydra_state
from embedtrain.distributed.srun import set_ranks_from_srun
from embedtrain.distributed.world import PROCESS_USE, World, forget_destroyed_groups, joined_world
from embedtrain.inference.loading.load import QUIET_LOGGERS
from embedtrain.utils.limits import explain_limits
from embedtrain.utils.streams import NoOutput


@contextlib.contextmanager
def own_process_state(name: str, *, quiet: bool) -> Iterator[None]:
    """Run a block as the command `name`, and leave the process as it was.

    The environment, the hook for errors, torch's random state and settings of compilation, warnings, the verbosity of
    libraries, Hydra's state and the CUDA device are restored, and process groups that the block has left are freed. A
    `quiet` block prints nothing, and gives its warnings to Python. A ConfigError if another thread runs one.
    """
    with PROCESS_USE.of_call(name, may_wait=False), _restored_state(quiet=quiet):
        yield


@contextlib.contextmanager
def _restored_state(*, quiet: bool) -> Iterator[None]:
    environment = dict(os.environ)
    levels = {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    excepthook = sys.excepthook  # which torch replaces with each process group
    graphs, lowering = torch._dynamo.config.recompile_limit, torch._functorch.config.force_non_lazy_backward_lowering
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[] if device is None else [device]))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(own_hydra_state())
        stack.enter_context(explain_limits())
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(NoOutput()))
        try:
            set_ranks_from_srun(os.environ)
            ignore_accelerate_environment()
            yield
        finally:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
            sys.excepthook = excepthook
            # As `compile_blocks` sets them; torch's own context managers change them for one thread.
            torch._dynamo.config.recompile_limit = graphs
            torch._functorch.config.force_non_lazy_backward_lowering = lowering
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
            if device is not None:
                torch.cuda.set_device(device)
            if not dist.is_initialized():
                free_process_groups()


def free_process_groups() -> None:
    """Free the process groups of this process that were destroyed.

    Reference cycles and DTensor's cache (torch 2.11 to 2.15) keep them alive, and each group of gloo has threads.
    """
    debug._clear_sharding_prop_cache()
    forget_destroyed_groups()
    gc.collect()


class SharedWorld:
    """The world of objects that outlive a call: joined by the first, left when the last one is closed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._users = 0

    def join(self, timeout: float) -> World:
        """Join the other ranks, or use the world that is joined already."""
        if self._users == 0:
            world = self._stack.enter_context(joined_world(timeout))
            if world.size == 1:
                # Before modules are torn down. With others, a rank that failed must not wait for them at its end.
                atexit.register(self._stack.close)
        else:
            with joined_world(timeout) as world:
                pass
        self._users += 1
        return world

    def leave(self) -> None:
        """Leave once; the last to leave destroys the process group, unless the program created it."""
        self._users -= 1
        if self._users == 0:
            atexit.unregister(self._stack.close)
            self._stack.close()
            if not dist.is_initialized():
                free_process_groups()


SHARED_WORLD = SharedWorld()
