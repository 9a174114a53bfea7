"""How much a file may ask of the reader before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds against hostile or broken files; raise them for a file that is meant to be that large.

    `text_bytes`: uncompressed size of one trace. `ratio`: how many times larger than its gz a trace may be, once it is
    past `ratio_from_bytes`. `header_bytes`: everything of a trace beside its events. `files`: traces in one folder.
    """

    text_bytes: int = 64 << 30
    ratio: int = 250
    ratio_from_bytes: int = 256 << 20
    header_bytes: int = 64 << 20
    files: int = 16384

    @classmethod
    def lifted(cls) -> Limits:
        """Bounds for files that are trusted: any size, any ratio."""
        return cls(text_bytes=1 << 62, ratio=1 << 31, header_bytes=1 << 32)
