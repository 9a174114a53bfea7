"""Integer columns as one compressed text that a page can hold: exact, small, and quick to unpack in a browser.

A column is stored as its differences (where that is smaller) less their minimum, byte by byte: first all lowest bytes,
then the next, as many as the largest value needs. Deflate then finds the pattern of the steps, and a browser undoes it
with its own `DecompressionStream`. Values up to 2**53 survive, which is what a number holds there.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["Pack", "unpack"]

Ints = npt.NDArray[np.int64]


class Pack:
    """Collects columns and plain facts, and becomes text."""

    def __init__(self) -> None:
        self._columns: list[dict[str, object]] = []
        self._planes: list[bytes] = []
        self._facts: dict[str, object] = {}

    def add(self, name: str, values: Ints | pl.Series | Sequence[int], *, delta: bool = False) -> None:
        """A column of integers; nulls become -1. `delta` stores differences, which suits times in order."""
        if isinstance(values, pl.Series):
            values = values.cast(pl.Int64).fill_null(-1).to_numpy()
        data: Ints = np.asarray(values, dtype=np.int64)
        if delta:
            data = np.diff(data, prepend=np.int64(0))
        base = int(data.min()) if data.size else 0
        rest = (data - base).astype("<u8")
        top = int(rest.max()) if rest.size else 0
        planes = (top.bit_length() + 7) // 8
        self._columns.append({"name": name, "n": data.size, "base": base, "planes": planes, "delta": delta})
        if planes:
            self._planes.append(rest.view(np.uint8).reshape(-1, 8)[:, :planes].T.tobytes())

    def fact(self, name: str, value: object) -> None:
        """A plain value: what JSON can hold."""
        self._facts[name] = value

    def text(self) -> str:
        """Everything, as base64 of a zlib stream: length of the header (4 bytes, little endian), header, planes."""
        header = json.dumps({"columns": self._columns, "facts": self._facts}, separators=(",", ":")).encode()
        raw = len(header).to_bytes(4, "little") + header + b"".join(self._planes)
        return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def unpack(packed: str) -> tuple[dict[str, list[int]], Mapping[str, object]]:
    """The columns and facts of `Pack.text()`: what the page's script does, for whoever wants the numbers back."""
    raw = zlib.decompress(base64.b64decode(packed))
    size = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + size])
    at = 4 + size
    columns: dict[str, list[int]] = {}
    for column in header["columns"]:
        n, planes = int(column["n"]), int(column["planes"])
        value = np.full(n, int(column["base"]), dtype=np.int64)
        for plane in range(planes):
            value += np.frombuffer(raw, np.uint8, n, at).astype(np.int64) << (8 * plane)
            at += n
        columns[str(column["name"])] = (np.cumsum(value) if column["delta"] else value).tolist()
    return columns, header["facts"]
