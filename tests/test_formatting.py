"""Formats of counts, bytes and durations."""

import pytest

from embedtrain.utils.formatting import (
    decode_argument,
    format_bytes,
    format_count,
    format_duration,
    mask_passwords,
    printable,
    shorten_message,
)


def test_counts_are_grouped_and_plural():
    assert [format_count(n, "row") for n in (0, 1, 1234)] == ["0 rows", "1 row", "1,234 rows"]
    assert format_count(2, "query", "queries") == "2 queries"


@pytest.mark.parametrize(
    ("num_bytes", "decimal", "binary"),
    [
        (0, "0 bytes", "0 bytes"),
        (999, "999 bytes", "999 bytes"),
        (1536, "1.5 KB", "1.5 KiB"),
        (3 * 10**9, "3.0 GB", "2.8 GiB"),
        (5 * 2**50, "5,629.5 TB", "5,120.0 TiB"),
    ],
)
def test_bytes_have_the_largest_unit(num_bytes, decimal, binary):
    assert format_bytes(num_bytes) == decimal
    assert format_bytes(num_bytes, binary=True) == binary


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (250, "4 min 10 s"), (3599.7, "1 h 0 min"),
        (11520, "3 h 12 min"), (273600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_durations_have_two_units_at_most(seconds, text):
    assert format_duration(seconds) == text


def test_control_characters_are_visible_and_letters_stay():
    letters = "Ünïcödé 中文 עברית 👩‍👩‍👧 é [bold]"
    assert printable(letters) == letters
    assert printable("\x1b[31m\x07\x9b2J\x7f\u202e\u2066\u2028\r\n\t") == (
        r"\x1b[31m\x07\x9b2J\x7f\u202e\u2066\u2028\r\n\t"
    )
    assert printable("\x1b\n\t\r", lines=True) == "\\x1b\n\t\\r"


def test_arguments_are_utf8_in_any_locale():
    as_in_ascii = "Zürich 中".encode().decode("ascii", "surrogateescape")
    assert decode_argument(as_in_ascii) == decode_argument("Zürich 中") == "Zürich 中"
    assert decode_argument("\udcff") == "\ufffd"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:hush@host/x", "https://me:***@host/x"),
        (
            "simplecache::ftp://me:hu@sh@host/x and s3://:hush@host",
            "simplecache::ftp://me:***@host/x and s3://:***@host",
        ),
        ("http://me:hu/sh@host", "http://me:***@host"),
        ("cannot connect to 'HTTPS://hush@proxy:8080'", "cannot connect to 'HTTPS://***@proxy:8080'"),
        ("hf://datasets/owner/name@main/x", None),
        ("http://host:8080/a@b", None),
        ("sftp://me@host/x me@host.org C:/a@b", None),
    ],
)
def test_passwords_in_urls_are_masked(text, masked):
    assert mask_passwords(text) == (masked or text)


def test_long_values_are_shortened_in_messages():
    path = "/" + "f" * 200 + "/" + "g" * 200
    assert shorten_message(f"model.path={path}: missing") == f"model.path={path}: missing"
    text = shorten_message(f"unknown option {'x' * 5000}=1; did you mean train.steps?")
    assert text.startswith("unknown option xxx")
    assert text.endswith("x=1; did you mean train.steps?")
    assert len(text) < 400
    assert len(shorten_message("value " * 10_000)) < 6100
