"""Text at many places of one buffer at once: words, decimal numbers, strings. All columns, no loops over rows.

A word is the eight bytes from a position on as a little-endian integer: the first byte is the lowest. The buffer must
reach at least `SLACK` bytes past every position asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = [
    "SLACK",
    "Bools",
    "Bytes",
    "Positions",
    "Words",
    "as_categorical",
    "categorical",
    "decimals",
    "different",
    "integers",
    "word_view",
]

Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

SLACK = 32
_U = np.uint64
_MASK: Words = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)
_SHIFT: Words = np.array([56, *(8 * (8 - n) for n in range(1, 9))], dtype=np.uint64)
_POWER = np.array([10**n for n in range(9)], dtype=np.int64)
_ZEROS, _CARRY, _HIGH, _ONES = (_U(0x0101010101010101 * k) for k in (0x30, 0x76, 0x80, 0x01))
# Two digits, then two pairs, then two fours into one number: what the higher one counts, where the lower lies, the rest.
_PAIRS = (
    (_U(10), _U(8), _U(0x00FF00FF00FF00FF)),
    (_U(100), _U(16), _U(0x0000FFFF0000FFFF)),
    (_U(10000), _U(32), _U(0xFFFFFFFF)),
)
_MINUS, _DOT = 0x2D, 0x2E
_MIX: Words = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
# What may follow a JSON number: a comma, a bracket, white space. Anything else (an exponent) is not read here.
_AFTER_NUMBER = np.zeros(256, dtype=np.bool_)
_AFTER_NUMBER[[0x2C, 0x5D, 0x7D, 0x20, 0x09, 0x0A, 0x0D]] = True


def word_view(buffer: bytes) -> Words:
    """The word at every position of `buffer`, without a copy."""
    return np.ndarray((max(len(buffer) - 7, 0),), dtype="<u8", buffer=buffer, strides=(1,))


def _digits(words: Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The number that the leading decimal digits of each word make, and how many digits those are (0 to 8; the number
    means nothing where there is none)."""
    x = words ^ _ZEROS
    stop = x + _CARRY
    stop |= x
    stop &= _HIGH  # the high bit of every byte that is no digit
    # Count the bytes below the lowest of them; a word of eight digits has none, and all its bytes count.
    bytes_below = ~stop
    bytes_below += _U(1)
    bytes_below &= stop
    bytes_below >>= _U(7)
    bytes_below -= _U(1)
    bytes_below &= _ONES
    bytes_below *= _ONES
    bytes_below >>= _U(56)
    count = bytes_below.view(np.int64)
    x <<= _SHIFT.take(count)  # right-align: digits last, zeros before
    for base, shift, mask in _PAIRS:
        np.right_shift(x, shift, out=stop)
        x *= base
        x += stop
        x &= mask
    return x.view(np.int64), count


def _unsigned(words: Words, at: Positions) -> tuple[Positions, Positions, Bools]:
    """Numbers of up to 18 digits at `at`: their values, the positions after them, and whether they could be read."""
    value, count = _digits(words[at])
    end = at + count
    ok = count > 0
    more = np.flatnonzero(count == 8)
    for room in (8, 2):
        if not more.size:
            break
        every = more.size == at.size
        further, n = _digits(words[end if every else end[more]])
        fits = n <= room
        ok[more[~fits]] = False
        n = np.minimum(n, room)
        scaled = value if every else value[more]
        value[more] = np.where(fits & (n > 0), scaled * _POWER.take(n) + further, scaled)
        end[more] += n
        more = more[n == 8]
    return value, end, ok


def integers(text: Bytes, words: Words, at: Positions) -> tuple[Positions, Bools]:
    """JSON integers at `at`: values, and whether each could be read (false: no digits, too long, a fraction, ...)."""
    negative = text[at] == _MINUS
    signed = bool(negative.any())
    value, end, ok = _unsigned(words, at + negative if signed else at)
    ok &= _AFTER_NUMBER.take(text[end])
    return np.where(negative, -value, value) if signed else value, ok


def decimals(text: Bytes, words: Words, at: Positions, limit: int) -> tuple[Positions, Bools]:
    """JSON numbers in microseconds at `at` as exact nanoseconds, and whether each could be read (false too where there
    is more than the nanosecond, an exponent, or `limit` microseconds and more)."""
    negative = text[at] == _MINUS
    signed = bool(negative.any())
    value, end, ok = _unsigned(words, at + negative if signed else at)
    ok &= value < limit
    value *= 1000
    dotted = text[end] == _DOT
    if dotted.any():
        fraction, count = _digits(words[end + 1])
        ok &= ~dotted | ((count >= 1) & (count <= 3))
        value += np.where(dotted, fraction * _POWER.take(np.clip(3 - count, 0, 3)), 0)
        end = np.where(dotted, end + 1 + count, end)
    ok &= _AFTER_NUMBER.take(text[end])
    return np.where(negative, -value, value) if signed else value, ok


def categorical(buffer: bytes, words: Words, start: Positions, stop: Positions) -> pl.Series:
    """The strings `buffer[start:stop]`, which must be valid UTF-8, as a categorical series."""
    texts, place = different(buffer, words, start, stop)
    return as_categorical(texts, place)


def as_categorical(texts: Sequence[str], place: Positions) -> pl.Series:
    """`texts[place]` as a categorical series."""
    return pl.Series("name", texts, dtype=pl.String()).cast(pl.Categorical())[place]


def different(buffer: bytes, words: Words, start: Positions, stop: Positions) -> tuple[list[str], Positions]:
    """The different strings among `buffer[start:stop]`, and for each of them its place there.

    A trace holds few different names: sorted by length, both ends and the middle, equal ones lie side by side, and each
    is compared in full with the one before it.
    """
    length = stop - start
    low = words[start] & _MASK.take(np.minimum(length, 8))
    high = words[np.maximum(stop - 8, 0)] & -(length > 8).astype(np.uint64)  # short ones lie in the first word
    rest = np.maximum(length - 9, 0) >> 3  # whole words between these two
    middle = words[start + 8 * ((rest + 1) >> 1)] & -(rest > 0).astype(np.uint64)
    key = ((low * _MIX[0] ^ high) * _MIX[1] ^ middle) * _MIX[2] + length.astype(np.uint64)
    order = np.argsort(key)
    new = np.ones(key.size, dtype=np.bool_)
    for values in (length, low, high):
        values = values[order]
        differs = values[1:] != values[:-1]
        new[1:] = differs if values.dtype == length.dtype else new[1:] | differs
    rest = rest[order]
    ends = np.cumsum(rest)
    total = int(ends[-1]) if ends.size else 0
    if total:
        first = ends - rest
        ramp = np.arange(total)
        between = words[np.repeat(start[order] + 8 - 8 * first, rest) + 8 * ramp]
        wrong = between[ramp - np.repeat(rest, rest)] != between  # the word of the string before, where it is as long
        if wrong.any():
            new |= np.logical_or.reduceat(np.append(wrong, False), first) & (rest > 0)
    run = np.cumsum(new) - 1
    place = np.empty(key.size, dtype=np.int64)
    place[order] = run
    heads = order[new]
    found: dict[bytes, int] = {}
    ids = [
        found.setdefault(buffer[a:b], len(found))
        for a, b in zip(start[heads].tolist(), stop[heads].tolist(), strict=True)
    ]
    if len(found) < len(ids):  # others lay between
        place = np.array(ids, dtype=np.int64)[place]
    # A place may be a guess that its caller drops later, and begin inside a character.
    return [text.decode(errors="replace") for text in found], place
