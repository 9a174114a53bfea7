"""Kernel names short enough to read on a slice."""

from __future__ import annotations

import functools

__all__ = ["short_kernel_name"]

_OPEN, _CLOSE = "<({[", ">)}]"


@functools.lru_cache(maxsize=65536)
def short_kernel_name(name: str) -> str:
    """`name` without return type, template arguments, parameters and anonymous namespaces.

    `void at::native::reduce_kernel<512, 1, f<float> >(f<float>)` becomes `at::native::reduce_kernel`. A name whose
    brackets do not match, or that would become empty, stays as it is.
    """
    plain = name.replace("(anonymous namespace)::", "")
    out: list[str] = []
    depth = 0
    for at, character in enumerate(plain):
        if character in _OPEN:
            # A function's own parameters end its name; what follows is a qualifier at most.
            if character == "(" and depth == 0 and out and plain[:at].strip() != "void":
                break
            depth += 1
        elif character in _CLOSE and plain[max(0, at - 1)] != "-":
            depth -= 1
            if depth < 0:
                return name
        elif depth == 0:
            out.append(character)
    short = "".join(out).removeprefix("void ").strip()
    return short if short and depth == 0 else name
