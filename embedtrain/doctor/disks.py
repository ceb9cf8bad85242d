"""Folders that a training writes to: whether it can, how much room there is, how fast they are, and who sees them."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from embedtrain.distributed.world import World
from embedtrain.doctor.finding import Finding, Level

_TOPIC = "disks"
_GB = 10**9
_PIECE = 4 << 20  # bytes written at a time
_SIZE, _SECONDS = 256 << 20, 5.0  # at most, of the file that is written and read again
_LITTLE = 5 * _GB
_IN_MEMORY = ("tmpfs", "ramfs")
_OF_CONTAINER = ("overlay", "aufs")
_OVER_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "virtiofs",
    "wekafs",
)


def check_disk(name: str, wanted: Path, *, measure: bool) -> list[Finding]:
    """A folder, or the one that it will be made in.

    Args:
        name: the option that it is.
        wanted: the folder; it is not made.
        measure: whether a file is written and read to find the speed.
    """
    wanted = wanted.expanduser().absolute()
    place = _there(wanted)
    told = f"{wanted}" if place == wanted else f"{wanted} (will be made in {place})"
    if not place.is_dir():
        return [Finding(_TOPIC, name, f"{told}: it is a file", Level.problem, f"Choose another {name}.")]
    kind = _kind(place)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".embedtrain-doctor-") as file:
            file.write(b"1" * _PIECE)
            file.flush()
            os.fsync(file.fileno())
            speed = _speed(file.fileno()) if measure else "speed not measured, because quick=true"
    except OSError as error:
        do = f"Choose a folder for {name} that this user can write to, with room in it."
        return [Finding(_TOPIC, name, f"{told} ({kind}) cannot be written: {error.strerror}", Level.problem, do)]
    about = os.statvfs(place)
    free, size = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    text = f"{told}, {kind}, {free / _GB:,.1f} GB free of {size / _GB:,.1f} GB; {speed}"
    if kind in _IN_MEMORY:
        do = f"It takes memory, and is gone with the machine: choose a disk for {name}."
        return [Finding(_TOPIC, name, text, Level.warning, do)]
    if free < _LITTLE:
        do = "Make room: a checkpoint takes about 12 bytes a parameter; checkpoint.max_disk_gb limits all of them."
        return [Finding(_TOPIC, name, text, Level.warning, do)]
    if kind in _OF_CONTAINER:
        do = f"It is gone with the container: mount a volume for {name}."
        return [Finding(_TOPIC, name, text, Level.note, do)]
    return [Finding(_TOPIC, name, text)]


def check_shared_disk(name: str, wanted: Path, world: World, hosts: list[str]) -> list[Finding]:
    """Whether all hosts see what the first rank writes into a folder. A collective.

    Args:
        name: the option that it is.
        wanted: the folder, or one that will be made.
        world: the ranks.
        hosts: of each rank.
    """
    if len(set(hosts)) == 1:
        return []
    place = _there(wanted.expanduser().absolute())
    written: Path | None = None
    with contextlib.suppress(OSError):
        if world.is_main:
            number, made = tempfile.mkstemp(dir=place, prefix=".embedtrain-doctor-")
            os.close(number)
            written = Path(made)
    shown = world.broadcast(written)
    try:
        seen = world.gather(shown is not None and _appears(shown))
    finally:
        if written is not None:
            written.unlink(missing_ok=True)
    if shown is None:
        return [Finding(_TOPIC, f"{name} on all hosts", "not looked at, because the first rank cannot write there")]
    blind = sorted({hosts[rank] for rank, sees in enumerate(seen) if not sees})
    if blind:
        do = f"Choose a folder for {name} on a file system that all hosts mount, at the same place."
        text = f"{', '.join(blind)} cannot see what {hosts[0]} writes into {place}"
        return [Finding(_TOPIC, f"{name} on all hosts", text, Level.problem, do)]
    return [Finding(_TOPIC, f"{name} on all hosts", f"seen by {len(set(hosts))} hosts")]


def _there(wanted: Path) -> Path:
    """The folder, or the nearest above it that this user can see."""
    for place in (wanted, *wanted.parents):
        with contextlib.suppress(OSError):
            if place.exists():
                return place
    return Path("/")


def _appears(path: Path) -> bool:
    until = time.monotonic() + 10.0  # a shared file system may take a moment
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _speed(file: int) -> str:
    """Written past the cache of the system, and read again past it where it lets go of the file."""
    piece = os.urandom(_PIECE)
    began, written = time.perf_counter(), 0
    while written < _SIZE and time.perf_counter() - began < _SECONDS:
        written += os.write(file, piece)
    os.fsync(file)
    writing = time.perf_counter() - began
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    began, read = time.perf_counter(), 0
    while found := os.read(file, _PIECE):
        read += len(found)
    reading = time.perf_counter() - began
    return f"writes {written / writing / 1e6:,.0f} MB/s, reads {read / reading / 1e6:,.0f} MB/s ({written >> 20} MiB)"


def _kind(place: Path) -> str:
    """The file system that a folder is on."""
    best, kind = "", "unknown file system"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, where, found, *_ = line.split(" ")
        where = where.encode().decode("unicode_escape")
        inside = place == Path(where) or Path(where) in place.parents
        if inside and len(where) >= len(best):
            best, kind = where, found
    return f"{kind} over the network" if kind in _OVER_NETWORK or kind.startswith("fuse.") else kind
