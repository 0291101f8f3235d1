import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import MAX_BYTES, format_bytes, parse_bytes
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1GiB", 1 << 30),
        ("512MB", 512_000_000),
        ("1.5 gib", 3 << 29),
        (" 2 KiB ", 2048),
        ("3kb", 3000),
        ("7", 7),
        ("7 B", 7),
        ("0.5KiB", 512),
        ("1TiB", 1 << 40),
        (4096, 4096),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["12 parsecs", "", "GiB", "-1GiB", "1e9", "1,5GiB", "1 GiB 2", "0x10"]
)
def test_text_that_is_no_size_names_the_value_and_an_example(text):
    with pytest.raises(ConfigError) as error:
        parse_bytes(text)
    assert "GiB" in str(error.value)
    assert not text or text.split()[-1] in str(error.value)


@pytest.mark.parametrize("size", [0, -1, "0", "0GiB", "0.4B", MAX_BYTES + 1, "9" * 23 + "TiB"])
def test_a_size_outside_the_limits_names_the_limits(size):
    with pytest.raises(ConfigError, match=str(MAX_BYTES)):
        parse_bytes(size)


@pytest.mark.parametrize("size", [1.5, None, True, b"1GiB", [1]])
def test_a_size_of_another_type_is_refused(size):
    with pytest.raises(ConfigError, match="text like '1GiB' or an integer"):
        parse_bytes(size)


def test_thousands_of_digits_are_refused_before_they_are_multiplied():
    with pytest.raises(ConfigError, match="more digits"):
        parse_bytes("1" * 5000)


@given(st.integers(1, MAX_BYTES))
def test_an_integer_is_its_own_size(num_bytes):
    assert parse_bytes(num_bytes) == num_bytes == parse_bytes(str(num_bytes))


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert 1 <= parse_bytes(text) <= MAX_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_bytes_are_shown_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text
