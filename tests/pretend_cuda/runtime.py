"""Stubs of torch.cuda: one device of an H200's size and one stream, on which everything is done at once."""

import contextlib
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.profiler

GIB = 2**30
TOTAL, FREE, RESERVED, PEAK, ALLOCATED = 139 * GIB, 130 * GIB, 2 * GIB, 1 * GIB, GIB // 2


def install(waits: Callable[[str], None]) -> None:
    """Replace what the package, FSDP and torch's profiler use; `waits` is called where the host waits."""

    class Stream:
        device, device_index, device_type, stream_id, priority = torch.device("cuda", 0), 0, 1, 1, 0

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def wait_stream(self, stream: "Stream") -> None: ...

        def wait_event(self, event: "Event") -> None: ...

        def record_event(self, event: "Event | None" = None) -> "Event":
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            waits("Stream.synchronize")

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *args: object) -> None: ...

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seconds: float | None = None

        def record(self, stream: Stream | None = None) -> None:
            self.seconds = time.perf_counter()

        def wait(self, stream: Stream | None = None) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            waits("Event.synchronize")

        def elapsed_time(self, end: "Event") -> float:
            assert self.seconds is not None and end.seconds is not None, "both events have to be recorded"
            return 1000 * (end.seconds - self.seconds)

    stream = Stream()
    values: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "is_current_stream_capturing": False, "is_bf16_supported": True,
        "current_stream": stream, "default_stream": stream, "get_device_name": "a pretended GPU",
        "get_device_capability": (9, 0), "get_arch_list": ["sm_90"],
        "mem_get_info": (FREE, TOTAL), "memory_allocated": ALLOCATED, "max_memory_allocated": PEAK,
        "memory_reserved": RESERVED, "max_memory_reserved": RESERVED,
        "memory_stats": {"allocated_bytes.all.current": ALLOCATED, "reserved_bytes.all.current": RESERVED},
        "memory_summary": "", "set_device": None, "empty_cache": None, "reset_peak_memory_stats": None,
        "set_per_process_memory_fraction": None, "set_sync_debug_mode": None,
        "manual_seed": None, "manual_seed_all": None, "set_rng_state": None, "_lazy_init": None, "init": None,
        "get_device_properties": types.SimpleNamespace(
            name="a pretended GPU", total_memory=TOTAL, major=9, minor=0, multi_processor_count=132
        ),
    }  # fmt: skip

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    for name, value in values.items():
        setattr(torch.cuda, name, constant(value))
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[assignment,misc]
    torch.cuda.stream = torch.cuda.device = lambda *args: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda *args: waits("cuda.synchronize")  # type: ignore[assignment]

    class Profile(torch.profiler.profile):
        """Of the CPU, since there are no kernels; torch complains about every operation otherwise."""

        def __init__(self, *, activities: Any = None, **options: Any) -> None:
            super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **options)

    torch.profiler.profile = Profile  # type: ignore[misc]
    # Random numbers of the device come from the CPU's generator, which callers keep as well.
    torch.cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)  # type: ignore[assignment]
    torch.accelerator.current_stream = constant(stream)
    torch.accelerator.synchronize = lambda *args: waits("accelerator.synchronize")  # type: ignore[assignment]
