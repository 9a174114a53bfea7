"""Files on shared or object storage by URL (`s3://bucket/capture`, `memory://x`, `file:///data`), through fsspec.

fsspec is imported when a URL is given, never before. Nothing here lists or reads more than it is asked for.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from traceana.errors import EngineError

__all__ = ["Remote", "is_url"]

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_EXTRAS = {"s3": "s3", "s3a": "s3"}


def is_url(place: object) -> bool:
    """Whether `place` is a string that names a storage, as `s3://bucket/capture` does."""
    return isinstance(place, str) and _URL.match(place) is not None


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder on a storage. Every method raises OSError as for local files, where the storage fails."""

    url: str
    fs: Any
    root: PurePosixPath

    @classmethod
    def at(cls, url: str) -> Remote:
        """The folder (or file) `url`. Raises EngineError where nothing installed can reach such storage."""
        protocol = url.partition("://")[0].lower()
        try:
            core: Any = import_module("fsspec.core")
            fs, root = core.url_to_fs(url)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            package = f"'traceana[{extra}]'" if extra else f"fsspec and what it needs for {protocol}://"
            raise EngineError(
                f"nothing installed reads {protocol}:// ({error!s:.80})", where=url, hint=f"pip install {package}"
            ) from error
        except ValueError as error:
            raise EngineError(
                "no such storage", where=url, hint="give a folder, or a URL that fsspec knows, like s3://bucket/capture"
            ) from error
        return cls(url, fs, PurePosixPath(root))

    def files(self, folder: str = "") -> list[tuple[str, int]]:
        """Names and sizes of the files right in `folder`, sorted; none where there is no such folder."""
        place = self._at(folder)
        try:
            found = self._failing(self.fs.ls, place, detail=True)
        except FileNotFoundError:
            return []
        names = [(PurePosixPath(f["name"]).name, int(f["size"] or 0)) for f in found if f["type"] == "file"]
        return sorted((name, size) for name, size in names if not name.startswith("."))

    def is_file(self) -> bool:
        """Whether the URL itself is a file."""
        return bool(self._failing(self.fs.isfile, str(self.root)))

    def size(self, name: str) -> int:
        """The size of a file."""
        return int(self._failing(self.fs.size, self._at(name)) or 0)

    def read(self, name: str, most: int | None = None) -> bytes:
        """The bytes of a file, or its first `most`."""
        data: bytes = self._failing(self.fs.cat_file, self._at(name), start=0 if most else None, end=most)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file whole."""
        place = self._at(name)
        self._failing(self.fs.makedirs, str(PurePosixPath(place).parent), exist_ok=True)
        self._failing(self.fs.pipe_file, place, data)

    def fetch(self, name: str, into: Path) -> Path:
        """Copies a file to the local path `into`."""
        into.parent.mkdir(parents=True, exist_ok=True)
        with self._failing(self.fs.open, self._at(name), "rb") as source, into.open("wb") as file:
            self._failing(shutil.copyfileobj, source, file, 1 << 22)
        return into

    def remove(self, name: str) -> None:
        """Removes a folder and what is in it."""
        self._failing(self.fs.rm, self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return str(self.root / name) if name else str(self.root)

    @staticmethod
    def _failing(call: Any, *args: Any, **kwargs: Any) -> Any:
        """What `call` returns. Storages raise errors of their own; here they are OSErrors like those of files."""
        try:
            return call(*args, **kwargs)
        except (OSError, EngineError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error!s:.160}") from error
