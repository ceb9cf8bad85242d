"""Counts, bytes and durations as messages show them."""


def format_count(count: int, singular: str, plural: str | None = None) -> str:
    """`1 rank`, `2 ranks`, `1,234 rows`."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def format_bytes(num_bytes: float, *, binary: bool = False) -> str:
    """`812 bytes`, `1.5 GB`.

    Args:
        binary: units of 1024 bytes (`1.4 GiB`), which memory is counted in; the default is units of 1000, for disks and
            networks.
    """
    base, infix = (1024, "i") if binary else (1000, "")
    for unit in ("bytes", f"K{infix}B", f"M{infix}B", f"G{infix}B"):
        if abs(num_bytes) < base:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= base
    return f"{num_bytes:,.1f} T{infix}B"


def format_duration(seconds: float) -> str:
    """`0.8 s`, `42 s`, `4 min 10 s`, `3 h 12 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if minutes == 0:
        return f"{second} s"
    if hours == 0:
        return f"{minute} min {second} s"
    return f"{hours} h {minute} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
