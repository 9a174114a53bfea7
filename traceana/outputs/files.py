"""Output files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from traceana.errors import OutputError

__all__ = ["new_file"]


@contextmanager
def new_file(path: Path) -> Generator[Path, None, None]:
    """A temporary path beside `path` to write to; it becomes `path` at the end, or goes away on any failure.

    Makes missing parent folders. Raises OutputError where the file system refuses.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        temporary = Path(name)
        os.close(handle)
        yield temporary
        # mkstemp makes files that only their owner can read; give what an ordinary open() would have.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(f"cannot write ({reason})", where=str(path), hint="name another place with -o") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
