"""Amounts of memory and time, read and written."""

import pytest

from memory_estimator.common.units import format_bytes, format_seconds, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1B", 1), ("384GiB", 384 * 2**30), ("384 GB", 384 * 10**9), ("1.5TiB", 3 * 2**39)),
        *(("0.1TB", 10**11), ("2mib", 2 * 2**20), (" 7 KB ", 7000), ("12345678PiB", 12345678 * 2**50)),
    ],
)
def test_an_amount_is_read_exactly(text, size):
    assert parse_bytes(text) == size


def test_bytes_are_written_in_the_unit_that_reads_best():
    sizes = (0, 2**20 - 2**10, 150 * 2**20, 2**30, -3 * 2**29, 3 * 2**39)
    assert list(map(format_bytes, sizes)) == ["0 KiB", "1023 KiB", "150 MiB", "1.00 GiB", "-1.50 GiB", "1.50 TiB"]


def test_seconds_are_written_in_the_unit_that_reads_best():
    assert [format_seconds(s) for s in (0.0123, 9.4, 600, 7200, 86400 * 3)] == [
        "0.0123 s", "9.4 s", "10 min", "2 h", "3.0 days",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        *(("25Gbit/s", 25e9 / 8), ("8 bit/s", 1.0), ("1.5 Mbit/s", 187500.0)),
        *(("2GB/s", 2e9), ("1MiB/s", 2**20), ("7B/s", 7)),
    ],
)
def test_a_rate_is_read_in_bits_or_bytes(text, rate):
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("parse", "message", "texts"),
    [
        (
            parse_bytes,
            "memory must be",
            ("", "GiB", "-1GiB", "1,5GiB", "nanGiB", "171798", "1.GiB", "64G", "5 EiB", "0GiB", "9" * 400 + "GiB"),
        ),
        (
            parse_rate,
            "rate must be a positive",
            ("25Gb/s", "25Gbps", "25", "0Gbit/s", "-1GB/s", "kiB/s", "1kiB/s", "9" * 400 + "GB/s"),
        ),
    ],
)
def test_what_is_no_number_with_a_unit_is_refused_with_an_example(parse, message, texts):
    for text in texts:
        with pytest.raises(ValueError, match=rf"{message}.*; write it like"):
            parse(text)
