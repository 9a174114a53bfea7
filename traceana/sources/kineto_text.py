"""The text of a trace in blocks: gz or plain as its first bytes say, whatever the name ends in.

What can still be read of a damaged gz is given, and the damage is noted with its place in the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from isal import isal_zlib

from traceana.errors import SourceError
from traceana.sources.kineto_events import Lost
from traceana.sources.limits import Limits

__all__ = ["BLOCK", "text_blocks"]

BLOCK = 1 << 21
_DAMAGED = cast("type[Exception]", isal_zlib.error)
_READ = 1 << 19
_GZ = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_GZIP_WINDOW = 31
_OTHER = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


def text_blocks(path: Path, lost: list[Lost], limits: Limits, block: int = BLOCK) -> Iterator[bytes]:
    """The uncompressed text of `path`, in blocks of at most `block` bytes, without a byte-order mark. Damage goes to
    `lost`. Raises SourceError where the file cannot be read, is packed in another way, or passes the limits."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            for magic, name in _OTHER.items():
                if head.startswith(magic):
                    raise SourceError(
                        f"the file is {name}, not JSON or gz",
                        where=str(path),
                        hint="unpack it, or compress it with gzip",
                    )
            file.seek(0)
            blocks = _gunzip(file, lost, block) if head.startswith(_GZ) else iter(lambda: file.read(block), b"")
            yield from _within(blocks, path, file, limits, packed=head.startswith(_GZ))
    except OSError as error:
        raise SourceError(
            f"cannot read the trace ({error.strerror or error})",
            where=str(path),
            hint="check the path and its permissions",
        ) from error


def _within(blocks: Iterator[bytes], path: Path, file: BinaryIO, limits: Limits, *, packed: bool) -> Iterator[bytes]:
    total, first = 0, True
    for block in blocks:
        total += len(block)
        if total > limits.text_bytes:
            raise SourceError(
                f"the trace is larger than {limits.text_bytes} bytes",
                where=str(path),
                hint="--no-limits reads it, if the file is meant to be that large",
            )
        if packed and total > limits.ratio_from_bytes and total > limits.ratio * max(file.tell(), 1):
            raise SourceError(
                f"the gz unpacks to more than {limits.ratio} times its size",
                where=str(path),
                hint="this is how a gz bomb looks; --no-limits reads it, if you trust the file",
            )
        yield block.removeprefix(_BOM) if first else block
        first = False


def _gunzip(file: BinaryIO, lost: list[Lost], size: int) -> Iterator[bytes]:
    """The members of a gz file one after the other."""
    rest, start = b"", 0  # compressed bytes in hand, and where the member starts in the file
    while True:
        engine, given = isal_zlib.decompressobj(wbits=_GZIP_WINDOW), 0
        while not engine.eof:
            data = rest or file.read(_READ)
            try:
                block = engine.decompress(data, size)
            except _DAMAGED:
                yield from _salvage(file, start, given, lost, size)
                return
            if not data and not block and not engine.eof:
                lost.append(Lost("gz_truncated", "warning", 1, note=f"the gz ends too early, at byte {file.tell()}"))
                return
            rest = engine.unconsumed_tail
            if block:
                given += len(block)
                yield block
        rest = engine.unused_data or file.read(_READ)
        start = file.tell() - len(rest)
        if not rest.startswith(_GZ):
            if rest.strip(b"\0"):
                lost.append(Lost("gz_trailing_bytes", "warning", 1, note=f"bytes after the gz, from byte {start} on"))
            return


def _salvage(file: BinaryIO, start: int, given: int, lost: list[Lost], size: int) -> Iterator[bytes]:
    """What a damaged member still holds after its first `given` bytes: fed in small steps, down to single bytes."""
    file.seek(start)
    engine = zlib.decompressobj(_GZIP_WINDOW)
    skip, kept, step = given, bytearray(), 512
    while not engine.eof:
        piece = file.read(step)
        if not piece:
            break
        before = engine.copy()
        try:
            out = engine.decompress(piece)
        except zlib.error as error:
            if step == 1:
                note = f"{str(error)[:60]}, before byte {file.tell()} of the file"
                lost.append(Lost("gz_damaged", "warning", 1, note=note))
                break
            engine, step = before, 1
            file.seek(-len(piece), 1)
            continue
        kept += out[skip:]
        skip = max(skip - len(out), 0)
        if len(kept) >= size:
            yield bytes(kept)
            kept.clear()
    if kept:
        yield bytes(kept)
