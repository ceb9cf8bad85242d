"""Headers, pixels and places of pictures: files of every format, and files that are damaged, hostile or no picture."""

import errno
import inspect
import io
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedtrain.data.images import files
from embedtrain.data.images.files import (
    BadPicture,
    KnownPictures,
    PictureTable,
    Place,
    content_key,
    decode_picture,
    image_identity,
    place_key,
    read_header,
    read_picture,
)
from embedtrain.data.images.item import Picture
from embedtrain.data.rows import text_key
from embedtrain.errors import DataError, UnreadableError

Image = pytest.importorskip("PIL.Image")
features = pytest.importorskip("PIL.features")

RNG = np.random.default_rng(3)
COLOURS = RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8)
PHOTO = Image.fromarray(COLOURS)
# Formats that keep every pixel, and how they are written.
EXACT: dict[str, dict[str, Any]] = {
    "PNG": {},
    "WEBP": {"lossless": True, "exact": True},
    "TIFF": {"compression": "tiff_lzw"},
    "BMP": {},
    "PPM": {},
    "GIF": {},
    "JPEG2000": {},
}


def encoded(image: Any, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def saved(folder: Path, content: bytes, name: str = "picture") -> Place:
    path = folder / name
    path.write_bytes(content)
    return Place(str(path))


def pixels(place: Place) -> Any:
    """The decoded pixels [H, W, 3], after the size has been read from the header."""
    picture = read_picture(place)
    image = decode_picture(place, picture)
    assert (image.mode, image.size) == ("RGB", (picture.width, picture.height))
    return np.asarray(image)


@pytest.mark.parametrize("form", [*EXACT, "JPEG", "AVIF"])
def test_formats(form: str, tmp_path: Path) -> None:
    content = encoded(PHOTO, form, **EXACT.get(form, {}))
    place = saved(tmp_path, content)
    header = read_header(place)
    assert (header.picture.width, header.picture.height) == (60, 40)
    assert (header.format, header.has_more_frames) == (form, False)
    assert header.picture.key == content_key(content) < 1 << 63
    expected = Image.open(io.BytesIO(content)).convert("RGB")
    assert np.array_equal(pixels(place), np.asarray(expected))
    if form in EXACT and form != "GIF":
        assert np.array_equal(pixels(place), COLOURS)


def test_the_key_is_that_of_a_text_with_these_bytes(tmp_path: Path) -> None:
    assert content_key(b"a text") == text_key("a text")
    content = encoded(PHOTO, "PNG")
    first, second = saved(tmp_path, content, "a"), saved(tmp_path, content, "b")
    assert read_picture(first) == read_picture(second)
    keys = {read_header(place, key_of_place=True).picture.key for place in (first, second)}
    assert keys == {place_key(first), place_key(second)}
    assert len(keys) == 2
    picture = read_header(first, key_of_place=True).picture
    assert np.array_equal(np.asarray(decode_picture(first, picture)), COLOURS)


def test_a_range_of_a_file(tmp_path: Path) -> None:
    """As a member of a tar file is read, with other bytes around it."""
    first, second = encoded(PHOTO, "PNG"), encoded(PHOTO.rotate(90, expand=True), "JPEG")
    whole = saved(tmp_path, b"x" * 100 + first + b"y" * 7 + second)
    place = Place(whole.file, 100, len(first))
    assert read_picture(place) == read_picture(saved(tmp_path, first, "alone"))
    assert np.array_equal(pixels(place), COLOURS)
    last = Place(whole.file, 107 + len(first), None)
    assert (read_picture(last).width, read_picture(last).height) == (40, 60)
    with pytest.raises(BadPicture, match="ends 3 bytes before"):
        read_picture(Place(whole.file, 107 + len(first), len(second) + 3))
    with pytest.raises(BadPicture, match="empty"):
        read_picture(Place(whole.file, 10**6))
    for by_place in (True, False):
        with pytest.raises(BadPicture, match="before it does"):
            read_header(Place(whole.file, 1 << 70, 5), key_of_place=by_place)
    with pytest.raises(DataError, match=f"picture, bytes 100 to {100 + len(first):,}: "):
        decode_picture(place, Picture(5, 60, 40))


def test_by_place_only_the_first_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of photographs and pages; hashing would read a hundred thousand of them from end to end."""
    counted: list[int] = []
    readinto = files._Range.readinto

    def counting(self: Any, buffer: Any) -> int:
        counted.append(readinto(self, buffer))
        return counted[-1]

    monkeypatch.setattr(files._Range, "readinto", counting)
    large = Image.fromarray(RNG.integers(0, 256, (500, 700, 3), dtype=np.uint8))
    for form in ("JPEG", "PNG", "BMP", "PPM", "JPEG2000"):
        content = encoded(large, form)
        start = saved(tmp_path, b"x" * 1000 + content)
        place = Place(start.file, 1000, len(content))
        counted.clear()
        header = read_header(place, key_of_place=True)
        assert sum(counted) < 40_000 < len(content)
        assert header.picture == Picture(place_key(place), 700, 500)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_failing_disk_is_not_a_bad_picture(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row would be dropped for it, and is intact on the next start."""
    place = saved(tmp_path, encoded(PHOTO, "PNG"))
    picture = read_picture(place)

    def fail(self: Any, buffer: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files._Range, "readinto", fail)
    for call in (
        lambda: read_picture(place),
        lambda: read_header(place, key_of_place=True),
        lambda: decode_picture(place, picture),
    ):
        with pytest.raises(UnreadableError, match="picture cannot be read"):
            call()


def test_headers_of_many_pages(tmp_path: Path) -> None:
    """1,500 pages of 30 KiB in less than half a second of a CPU, with the hashes of their bytes."""
    page = Image.fromarray(RNG.integers(0, 16, (300, 200), dtype=np.uint8))
    content = encoded(page, "PNG")
    assert 20_000 < len(content) < 40_000
    places = [saved(tmp_path, content + number.to_bytes(2), f"{number}.png") for number in range(1500)]
    read_picture(places[0])
    spent = []
    for _ in range(3):
        start = time.process_time()
        assert len({read_picture(place).key for place in places}) == 1500
        spent.append(time.process_time() - start)
    assert min(spent) < 0.5


def png_chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    chunks, position = [], 8
    while position < len(content):
        (length,) = struct.unpack(">I", content[position : position + 4])
        chunks.append((content[position + 4 : position + 8], content[position + 8 : position + 8 + length]))
        position += 12 + length
    return chunks


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, data in chunks:
        parts.append(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))
    return b"".join(parts)


def oriented(form: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    if form == "PNG before its pixels":
        return encoded(PHOTO, "PNG", exif=exif)
    if form == "PNG behind its pixels":
        chunks = png_chunks(encoded(PHOTO, "PNG", exif=exif))
        (tag,) = (chunk for chunk in chunks if chunk[0] == b"eXIf")
        chunks.remove(tag)
        return png_of([*chunks[:-1], tag, chunks[-1]])
    # TIFF without compression: libtiff writes no other numbers than those of EXIF.
    return encoded(PHOTO, form, exif=exif, **(EXACT[form] if form == "WEBP" else {}))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["JPEG", "PNG before its pixels", "WEBP", "TIFF", "AVIF"])
def test_pictures_are_upright(form: str, orientation: int, tmp_path: Path) -> None:
    """As Pillow turns them, and as a definition of EXIF's numbers without Pillow: rows and columns of the picture."""
    content = oriented(form, orientation)
    result = pixels(saved(tmp_path, content))
    plain = np.asarray(Image.open(io.BytesIO(oriented(form, 1))).convert("RGB"))
    upright = {
        2: plain[:, ::-1],
        3: plain[::-1, ::-1],
        4: plain[::-1],
        5: plain.transpose(1, 0, 2),
        6: plain[::-1].transpose(1, 0, 2),
        7: plain[::-1, ::-1].transpose(1, 0, 2),
        8: plain[:, ::-1].transpose(1, 0, 2),
    }.get(orientation, plain)
    assert np.array_equal(result, upright)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_orientation_in_xmp(form: str, tmp_path: Path) -> None:
    """Which programs of photographers write, some of them alone."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><d tiff:Orientation="6"/></x:xmpmeta>'
    options = EXACT.get(form, {})
    if form == "TIFF":
        content = encoded(PHOTO, form, tiffinfo={700: xmp}, compression="tiff_lzw")
    elif form == "PNG":
        text = pytest.importorskip("PIL.PngImagePlugin").PngInfo()
        text.add_itxt("XML:com.adobe.xmp", xmp.decode())
        content = encoded(PHOTO, form, pnginfo=text)
    else:
        content = encoded(PHOTO, form, xmp=xmp, **options)
    plain = np.asarray(Image.open(io.BytesIO(encoded(PHOTO, form, **options))).convert("RGB"))
    assert np.array_equal(pixels(saved(tmp_path, content)), plain[::-1].transpose(1, 0, 2))


@pytest.mark.parametrize("orientation", [3, 6])
def test_an_orientation_behind_the_pixels_of_a_png_does_not_count(orientation: int, tmp_path: Path) -> None:
    """Neither in the header, which would have to decode the picture to find it, nor when it is decoded."""
    content = oriented("PNG behind its pixels", orientation)
    assert Image.open(io.BytesIO(content)).getexif()[0x0112] == orientation  # Pillow finds it, by decoding
    assert np.array_equal(pixels(saved(tmp_path, content)), COLOURS)


def with_garbage(form: str) -> bytes:
    """A picture whose header is intact, and whose pixels are not."""
    content = bytearray(encoded(PHOTO, form, **EXACT.get(form, {})))
    if form == "PNG":
        return png_of(
            [(name, b"garbage" * 9 if name == b"IDAT" else data) for name, data in png_chunks(bytes(content))]
        )
    if form == "JPEG":
        start = content.index(b"\xff\xda")  # start of scan
        return bytes(content[:start]) + b"\xff\xda\x00\x02garbage"
    start = len(content) // 2
    content[start:] = bytes(len(content) - start)
    return bytes(content[: start + 20])


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "BMP", "PPM", "GIF", "JPEG2000"])
def test_the_header_decodes_no_pixel(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(tmp_path, with_garbage(form), "damaged.bin")
    if form == "TIFF":  # its directory stands behind the pixels
        content = bytearray(encoded(PHOTO, "TIFF", compression="tiff_lzw"))
        content[8:200] = bytes(192)
        place = saved(tmp_path, bytes(content), "damaged.bin")
    picture = read_picture(place)
    assert (picture.width, picture.height) == (60, 40)
    with pytest.raises(DataError, match=r"damaged\.bin: its pixels cannot be decoded"):
        decode_picture(place, picture)


def test_no_method_that_decodes_is_called_for_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pytest.importorskip("PIL.ImageFile")
    places = [
        saved(tmp_path, oriented(form, 6), str(number))
        for number, form in enumerate(("JPEG", "PNG before its pixels", "PNG behind its pixels", "WEBP", "TIFF"))
    ]

    def load(image: Any) -> None:
        raise AssertionError(f"{image.format} is decoded")

    monkeypatch.setattr(file.ImageFile, "load", load)
    sizes = [(read_picture(place).width, read_picture(place).height) for place in places]
    assert sizes == [(40, 60), (40, 60), (60, 40), (40, 60), (40, 60)]


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "GIF"])
def test_transparent_pixels_are_white(form: str, tmp_path: Path) -> None:
    """Not black, nor whatever a file has under them; in between, the mean of the colour and white."""
    alpha = RNG.integers(0, 256, (40, 60), dtype=np.uint8)
    alpha[:10] = 0
    alpha[-10:] = 255
    image = Image.fromarray(np.dstack([COLOURS, alpha]))
    content = encoded(image, form, **EXACT[form])
    result = pixels(saved(tmp_path, content))
    assert (result[:10] == 255).all()
    stored = np.asarray(Image.open(io.BytesIO(content)).convert("RGBA")).astype(float)
    share = stored[..., 3:] / 255
    np.testing.assert_allclose(result, share * stored[..., :3] + (1 - share) * 255, atol=1)
    if form != "GIF":
        assert np.array_equal(result[-10:], COLOURS[-10:])


def test_transparent_pixels_are_those_of_transformers(tmp_path: Path) -> None:
    """Of its image processors, which composite on white in 5.23, and drop transparency in 5.17."""
    transforms = pytest.importorskip("transformers.image_transforms")
    if "return_numpy" not in inspect.signature(transforms.convert_to_rgb).parameters:
        pytest.skip("transformers 5.17 drops transparency")
    image = Image.fromarray(RNG.integers(0, 256, (40, 60, 4), dtype=np.uint8))
    content = encoded(image, "PNG")
    expected = transforms.convert_to_rgb(Image.open(io.BytesIO(content)), return_numpy=True)
    assert np.array_equal(pixels(saved(tmp_path, content)), expected)


def modes() -> dict[str, tuple[bytes, Any]]:
    """Files of other modes, and the colours that they show, [H, W] or [H, W, 3]."""
    grey = COLOURS[..., 0]
    wide = RNG.integers(0, 1 << 16, (40, 60)).astype(np.uint16)
    palette = PHOTO.quantize(16)
    bits = Image.fromarray(grey).convert("1")
    grey_alpha = Image.fromarray(np.dstack([grey, np.full_like(grey, 255)]))
    transparent = palette.copy()
    of_palette = np.asarray(palette.convert("RGB")).copy()
    of_palette[np.asarray(palette) == 3] = 255
    keyed = COLOURS.copy()
    keyed[:5] = (1, 2, 3)
    shown = keyed.copy()
    shown[:5] = 255
    cmyk = PHOTO.convert("CMYK")
    return {
        "L": (encoded(Image.fromarray(grey), "PNG"), grey),
        "LA": (encoded(grey_alpha, "PNG"), grey),
        "1": (encoded(bits, "PNG"), np.asarray(bits.convert("L"))),
        "P": (encoded(palette, "PNG"), np.asarray(palette.convert("RGB"))),
        "P with transparency": (encoded(transparent, "PNG", transparency=3), of_palette),
        "P with bytes": (encoded(transparent, "PNG", transparency=bytes([255] * 3 + [0])), of_palette),
        "RGB with a transparent colour": (encoded(Image.fromarray(keyed), "PNG", transparency=(1, 2, 3)), shown),
        "CMYK": (encoded(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))),
        "16 bits of PNG": (encoded(Image.fromarray(wide), "PNG"), wide >> 8),
        "16 bits of TIFF": (encoded(Image.fromarray(wide), "TIFF"), wide >> 8),
        "JPEG of greys": (
            encoded(Image.fromarray(np.full((40, 60), 77, dtype=np.uint8)), "JPEG"),
            np.full((40, 60), 77),
        ),
    }


@pytest.mark.parametrize("mode", modes())
def test_modes(mode: str, tmp_path: Path) -> None:
    content, colours = modes()[mode]
    expected = colours if colours.ndim == 3 else np.repeat(colours[..., None], 3, axis=2)
    assert np.array_equal(pixels(saved(tmp_path, content)), expected)


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_pixels_without_a_range_are_refused(mode: str, tmp_path: Path) -> None:
    image = Image.new(mode, (5, 4))
    with pytest.raises(BadPicture, match=f"mode {mode}"):
        read_picture(saved(tmp_path, encoded(image, "TIFF")))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_the_first_frame_of_several(form: str, tmp_path: Path) -> None:
    first, second = (Image.fromarray(np.full((40, 60, 3), value, dtype=np.uint8)) for value in (10, 200))
    content = encoded(first, form, save_all=True, append_images=[second, first], **EXACT.get(form, {}))
    place = saved(tmp_path, content)
    assert read_header(place).has_more_frames
    assert np.array_equal(pixels(place), np.full((40, 60, 3), 10))


def bomb(form: str) -> bytes:
    """A few kilobytes that would decode to 144 million pixels or more."""
    if form == "WEBP":  # the largest that a header can name
        frame = b"VP8X" + struct.pack("<I", 10) + bytes([0, 0, 0, 0]) + b"\xfe\x3f\x00" * 2
        small = encoded(PHOTO, "WEBP", lossless=True)[12:]
        return b"RIFF" + struct.pack("<I", 4 + len(frame) + len(small)) + b"WEBP" + frame + small
    if form == "JPEG":
        content = bytearray(encoded(Image.new("L", (8, 8)), "JPEG"))
        start = content.index(b"\xff\xc0") + 5
        content[start : start + 4] = struct.pack(">HH", 65500, 65500)
        return bytes(content)
    if form == "GIF":
        content = bytearray(encoded(Image.new("L", (8, 8)), "GIF"))
        content[6:10] = struct.pack("<HH", 65535, 65535)
        return bytes(content)
    options = {"TIFF": {"compression": "tiff_adobe_deflate"}, "BMP": {}}
    return encoded(Image.new("1", (12_000, 12_000)), form, **options.get(form, {}))


@pytest.mark.quick("PNG", "WEBP")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF", "GIF"])
def test_bombs_are_refused_undecoded(form: str, tmp_path: Path) -> None:
    """In a process with little memory: decoded they need half a gigabyte, or eight."""
    place = saved(tmp_path, bomb(form))
    assert os.path.getsize(place.file) < 1 << 20
    code = """
import resource, sys
from embedtrain.data.images.files import BadPicture, Place, pillow, read_picture
pillow()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_picture(Place(sys.argv[1]))
except BadPicture as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "MiB")
"""
    result = subprocess.run([sys.executable, "-c", code, place.file], capture_output=True, text=True, check=True)
    refusal, memory = result.stdout.strip().splitlines()
    assert "pixels" in refusal or (form == "WEBP" and "header is damaged" in refusal)  # the latter in Pillow 11
    assert int(memory.split()[0]) < 32
    assert result.stderr == ""


def test_the_limit_of_pixels(tmp_path: Path) -> None:
    place = saved(tmp_path, encoded(PHOTO, "PNG"))
    assert read_picture(place, max_pixels=2400).width == 60
    with pytest.raises(BadPicture, match=r"60 x 40 = 2,400 pixels.*2,399"):
        read_picture(place, max_pixels=2399)
    with pytest.raises(BadPicture, match=r"12000 x 12000 = 144,000,000"):
        read_picture(saved(tmp_path, bomb("PNG")))


OTHER: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty"),
    "text": (b"no picture at all", "no picture"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>', "SVG"),
    "svg with a prologue": (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- Made -->\n<!DOCTYPE svg []>\n<svg/>', "SVG"),
    "comments": (b"<!---->" * 2000, "no picture"),
    "pdf": (b"%PDF-1.7 ...", "PDF"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "Git LFS"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture"),
    "png without a header": (b"\x89PNG\r\n\x1a\n" + bytes(30), "no picture|damaged"),
    "png with a cut header": (encoded(PHOTO, "PNG")[:20], "no picture|damaged"),
    "jpeg with a cut header": (encoded(PHOTO, "JPEG")[:40], "no picture|damaged"),
    "webp with a cut header": (encoded(PHOTO, "WEBP")[:20], "no picture|damaged"),
    "tiff with a cut header": (encoded(PHOTO, "TIFF")[:9], "no picture|damaged"),
    "png with a bomb of text": (
        png_of(
            [(name, data) for name, data in png_chunks(encoded(PHOTO, "PNG")) if name == b"IHDR"]
            + [(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26)))]
        ),
        "damaged",
    ),
    "gif without pixels": (b"GIF89a" + bytes(40), "no pixels|no picture|damaged"),
}


@pytest.mark.parametrize("name", OTHER)
def test_files_that_are_no_picture(name: str, tmp_path: Path) -> None:
    content, named = OTHER[name]
    with pytest.raises(BadPicture, match=named) as caught:
        read_picture(saved(tmp_path, content))
    assert str(tmp_path) not in str(caught.value)  # the caller names the file, and its row
    assert "\n" not in str(caught.value)


def test_random_bytes_raise_nothing_else(tmp_path: Path) -> None:
    """Any damage is a refused picture, or an error that names the file."""
    rng = np.random.default_rng(11)
    outcomes = set()
    for form in [*EXACT, "JPEG"]:
        content = encoded(PHOTO, form, **EXACT.get(form, {}))
        for trial in range(60):
            damaged = bytearray(content)
            where = rng.integers(4, min(len(damaged), 300 if trial % 2 else 60), 4)
            damaged[where[0]] ^= int(rng.integers(1, 256))
            damaged[where[1]] ^= int(rng.integers(1, 256))
            if trial % 3 == 0:
                del damaged[int(rng.integers(12, len(damaged))) :]
            place = saved(tmp_path, bytes(damaged), f"damaged {form}")
            try:
                picture = read_picture(place, max_pixels=10**6)
            except BadPicture:
                outcomes.add("refused")
                continue
            try:
                decode_picture(place, picture)
                outcomes.add("decoded")
            except DataError as error:
                assert not isinstance(error, BadPicture)
                assert f"damaged {form}" in str(error)
                outcomes.add("named")
    assert outcomes == {"refused", "decoded", "named"}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_pixels_name_the_file(form: str, tmp_path: Path) -> None:
    content = encoded(PHOTO, form, **EXACT.get(form, {}))
    place = saved(tmp_path, content[: len(content) * 2 // 3], "cut\nshort.jpg")
    try:
        picture = read_picture(place)
    except BadPicture:
        assert form == "WEBP"  # its header has the length of the file
        return
    with pytest.raises(DataError, match=r"cut\\nshort\.jpg: its pixels cannot be decoded") as caught:
        decode_picture(place, picture)
    assert "\n" not in str(caught.value)


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    file = saved(tmp_path, b"x")
    for name, reason in (
        (str(tmp_path / "missing.png"), "does not exist"),
        (f"{file.file}/below.png", "does not exist"),
        (str(tmp_path), "folder"),
        (str(fifo), "device"),
        ("/dev/zero", "device"),
        (str(loop), "cannot be read"),
        ("a" * 5000, "cannot be read"),
        ("nul\0l.png", "cannot be read"),
    ):
        with pytest.raises(BadPicture, match=reason):
            read_picture(Place(name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    place = saved(tmp_path, encoded(PHOTO, "PNG"))
    os.chmod(place.file, 0)
    with pytest.raises(BadPicture, match="cannot be read: Permission denied"):
        read_picture(place)


def test_large_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(files.MAX_FILE_BYTES + 1)
    with pytest.raises(BadPicture, match=r"1\.1 GB"):
        read_picture(Place(str(path)))


def test_a_file_that_has_changed_or_is_gone(tmp_path: Path) -> None:
    place = saved(tmp_path, encoded(PHOTO, "PNG"), "fox.png")
    picture = read_picture(place)
    saved(tmp_path, encoded(Image.fromarray(COLOURS[::-1]), "PNG"), "fox.png")  # of the same size
    with pytest.raises(DataError, match=r"fox\.png: .*changed"):
        decode_picture(place, picture)
    of_place = Picture(place_key(place), 60, 40)
    assert np.array_equal(np.asarray(decode_picture(place, of_place)), COLOURS[::-1])
    saved(tmp_path, encoded(PHOTO.resize((30, 20)), "PNG"), "fox.png")
    with pytest.raises(DataError, match=r"fox\.png: it is 30 x 20, but was 60 x 40"):
        decode_picture(place, of_place)
    os.remove(place.file)
    with pytest.raises(DataError, match=r"fox\.png: it does not exist"):
        decode_picture(place, picture)


def test_threads_may_call_everything_at_once(tmp_path: Path) -> None:
    """In a fresh process, whose threads also import Pillow and its plugins together."""
    for number, form in enumerate([*EXACT, "JPEG"] * 4):
        saved(tmp_path, encoded(PHOTO, form, **EXACT.get(form, {})), f"{number:02}")
    code = """
import sys, threading
from pathlib import Path
from embedtrain.data.images.files import PICTURES, Place, decode_picture, read_picture
names = sorted(map(str, Path(sys.argv[1]).iterdir()))
start, results, failures = threading.Barrier(8), {}, []
def work(offset):
    start.wait()
    try:
        for i in range(len(names)):
            name = names[(i + 4 * offset) % len(names)]
            picture = read_picture(Place(name))
            PICTURES.add(picture, Place(name))
            pixels = decode_picture(PICTURES.place(picture), picture).tobytes()
            if results.setdefault(name, pixels) != pixels:
                failures.append(name)
    except BaseException as error:
        failures.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(results), failures)
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "32 []"


def table_of(folder: Path, places: dict[int, Place]) -> PictureTable:
    folder.mkdir()
    PictureTable.write(folder, places)
    return PictureTable(folder)


def test_a_table_of_places(tmp_path: Path) -> None:
    places = {
        (1 << 63) - 1: Place("/data/a.tar", 1 << 40, (1 << 30) - 1),
        0: Place("/data/a.tar", 512, 1),
        5: Place("/data/new\nline \udcff ü.png"),
        7: Place("/data/b.bin", 7, None),
    }
    table = table_of(tmp_path / "table", places)
    assert len(table) == 4
    assert {key: table.get(key) for key in places} == places
    assert [table.get(key) for key in (1, 6, 1 << 62)] == [None] * 3
    assert table_of(tmp_path / "empty", {}).get(5) is None
    with pytest.raises(DataError, match="missing"):
        PictureTable(tmp_path / "missing")


def test_a_table_of_a_hundred_thousand(tmp_path: Path) -> None:
    """24 bytes a picture, beside the names of files; written and opened without a loop over the file."""
    rng = np.random.default_rng(1)
    keys = np.unique(rng.integers(0, 1 << 62, 100_000)).tolist()
    places = {key: Place(f"/data/shard-{row % 100:03}.tar", 512 * row, 1000 + row) for row, key in enumerate(keys)}
    start = time.process_time()
    table = table_of(tmp_path / "table", places)
    written = time.process_time() - start
    size = sum(path.stat().st_size for path in (tmp_path / "table").iterdir())
    assert size == 24 * len(places) + 100 * (len("/data/shard-000.tar") + 8)
    start = time.process_time()
    found = [table.get(key) for key in keys[::10]]
    looked_up = time.process_time() - start
    assert found == [places[key] for key in keys[::10]]
    assert written < 5
    assert looked_up < 2


def test_known_pictures(tmp_path: Path) -> None:
    known = KnownPictures()
    fox, map_ = Picture(12, 640, 427), Picture(13, 5, 6)
    with pytest.raises(DataError, match=r"000000000000000c \(640x427\) is in no file"):
        known.place(fox)
    table_of(tmp_path / "table", {12: Place("a.png"), 13: Place("b.png")})
    for _ in range(2):
        known.add_table(tmp_path / "table")
    assert (known.place(fox), known.place(map_)) == (Place("a.png"), Place("b.png"))
    known.add(fox, Place("c.png"))
    assert (known.place(fox), known.place(map_)) == (Place("c.png"), Place("b.png"))
    table_of(tmp_path / "newer", {13: Place("d.png")})
    known.add_table(tmp_path / "newer")
    assert known.place(map_) == Place("d.png")


def test_the_identity_names_what_pixels_depend_on() -> None:
    import PIL

    assert f"Pillow {PIL.__version__}" in image_identity()
    assert f"libjpeg_turbo {features.version('libjpeg_turbo')}" in image_identity()
    assert image_identity().isprintable()


def test_without_pillow_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["PIL"] = None
from embedtrain.data.images.files import Place, read_picture
from embedtrain.errors import ConfigError
try:
    read_picture(Place(sys.executable))
except ConfigError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "images need Pillow" in result.stdout
    assert "[images]" in result.stdout
