"""Output files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from traceana.errors import OutputError

__all__ = ["new_file", "new_folder"]

_ABANDONED_S = 3600  # what nobody has written to for this long has no writer any more


@contextmanager
def new_file(path: Path) -> Generator[Path, None, None]:
    """A temporary path beside `path` to write to; it becomes `path` at the end, or goes away on any failure.

    Makes missing parent folders. Raises OutputError where the file system refuses.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        temporary = Path(name)
        os.close(handle)
        yield temporary
        # mkstemp makes files that only their owner can read; give what an ordinary open() would have.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Generator[Path, None, None]:
    """A temporary folder beside `path` to write files to; at the end it becomes `path`, or goes away on any failure.

    Where `path` is a folder already, the new files take their places in it one by one at the end, and what else is
    there stays. Makes missing parent folders. Raises OutputError where the file system refuses.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        if not path.exists():
            with suppress(OSError):  # another run may have made it just now
                os.rename(temporary, path)
                temporary = None
        if temporary is not None:
            for file in sorted(f for f in temporary.rglob("*") if f.is_file()):
                target = path / file.relative_to(temporary)
                if target.parent != path and target.parent.is_symlink():
                    what = "a folder in it is a link, which may lead anywhere"
                    raise OutputError(what, where=str(target.parent), hint="remove the link")
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except OutputError as error:
        if temporary is None or str(temporary) not in (error.where or ""):
            raise
        # The name of a file in the temporary folder says nothing.
        raise OutputError(error.what, where=str(path), hint=error.hint) from error
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _refused(path: Path, error: OSError) -> OutputError:
    reason = error.strerror or type(error).__name__
    return OutputError(f"cannot write ({reason})", where=str(path), hint="name another place with -o, or make room")


def _clear(path: Path) -> None:
    """Removes what runs that were killed left beside `path`."""
    for left in path.parent.glob(f".{_literal(path.name)}.*.part"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
