"""Secrets in what a capture holds: recognised by name or by shape, masked in facts, named (never shown) in losses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

__all__ = ["MASK", "Secret", "allowed_env", "find_in_text", "is_secret_name", "mask_text", "mask_value"]

MASK = "***"
UNNAMED = "(unnamed)"


class Secret(NamedTuple):
    """Where a secret stands in a text, and what it is called there; `(unnamed)` where only its shape gave it away."""

    name: str
    start: int
    end: int


# Parts of words that make a name worth a look, in lower case, and the rule that decides. `token`, `pat`, `pwd` and
# `_key` must end the name, or tokenizer_path, max_total_num_tokens and ssl_keyfile would be masked.
_HINTS = (
    "passw", "passphrase", "pwd", "secret", "credential", "authorization", "apikey", "privatekey", "_key", "-key",
    "token", "_pat", "-pat",
)  # fmt: skip
_NAME = re.compile(
    r"(?i)(?:passwo?r?d|passphrase|secret|credential|authorization|api[-_]?key|private[-_]?key"
    r"|(?:^|[-_.a-z])token$|(?:^|[-_.])(?:pat|pwd)$|[-_]key$)"
)
# PWD is the shell's folder; the others are marks of a tokenizer, or counts.
_NOT_NAME = re.compile(
    r"(?i)^(?:old)?pwd$|(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|stop|per|num|new)[-_]?token$"
)
_WORD = "".join(map(chr, (*range(48, 58), *range(65, 91), *range(97, 123)))) + "_.-"
_AFTER = re.compile(r"[\w.-]*")
_VALUE = re.compile(
    r"""(?P<join>\\?["']?\s{0,3}[=:]\s{0,3}|[ \t]+)"""
    r"""(?P<value>\\"[^"\\]*\\"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"',;)}\]]+)"""
)
_EMPTY = re.compile(r"(?i)(?:none|null|false|true|\*\*\*|[<{\[]?[>}\]]?|[-+]?[\d.,]{1,12}%?)")
_LONGEST_NAME = 128

# Values that are secrets whatever they are called: model hub, code host and cloud tokens, JSON web tokens, passwords in
# addresses, bearer headers. Each pattern with a literal that it needs, because most texts hold none of them.
_SHAPES = (
    ("hf_", re.compile(r"\bhf_[A-Za-z0-9]{20,200}")),
    ("sk-", re.compile(r"\bsk-[\w-]{20,200}")),
    ("gh", re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,200}")),
    ("github_pat_", re.compile(r"\bgithub_pat_\w{30,200}")),
    ("glpat-", re.compile(r"\bglpat-[\w-]{20,200}")),
    ("xox", re.compile(r"\bxox[abprs]-[\w-]{10,200}")),
    ("AKIA", re.compile(r"\bAKIA[A-Z0-9]{16}")),
    ("eyJ", re.compile(r"\beyJ[\w-]{10,4000}\.[\w-]{10,8000}\.[\w-]{5,4000}")),
    ("://", re.compile(r"(?<=://)[^\s:/@\"']{0,100}:(?P<part>[^\s/@\"']{1,200})(?=@)")),
    ("earer", re.compile(r"\b[Bb]earer\s+(?P<part>[\w.~+/=-]{8,4000})")),
)

# Environment variables that explain a server's speed. All others stay out: a list of what to leave out always misses
# one.
_ENV_ALLOWED = re.compile(
    r"(?:SGLANG_|SGL_|NCCL_|NVSHMEM_|TORCH_|TORCHINDUCTOR_|PYTORCH_|TRITON_|CUDA_|FLASHINFER_|DEEPEP_|OMP_|GLOO_|VLLM_)\w*"
    r"|CUDAHOSTCXX|PYTHONUNBUFFERED|PYTHONWARNINGS|PYTHONPATH|LD_LIBRARY_PATH"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret (`HF_TOKEN` yes, `tokenizer_path` no)."""
    return bool(_NAME.search(name)) and not _NOT_NAME.search(name.lstrip("-"))


def find_in_text(text: str) -> list[Secret]:
    """The secrets of a command line, a log, an environment dump or JSON text, in order, none overlapping another."""
    found = sorted({*_by_name(text), *_by_shape(text)}, key=lambda s: (s.start, -s.end, s.name))
    kept: list[Secret] = []
    for secret in found:
        if not kept or secret.start >= kept[-1].end:
            kept.append(secret)
    return kept


def _hints(text: str) -> list[tuple[int, int]]:
    """Start and end of every hint in `text`, in order."""
    low = text.lower()
    if len(low) != len(text):  # a few letters have a longer lower case, which would move every place after them
        low = "".join(c.lower() if c.isascii() else c for c in text)
    spans: list[tuple[int, int]] = []
    for hint in _HINTS:
        at = low.find(hint)
        while at >= 0:
            spans.append((at, at + len(hint)))
            at = low.find(hint, at + len(hint))
    return sorted(spans)


def _by_name(text: str) -> Iterator[Secret]:
    done = 0
    for start, end in _hints(text):
        if start < done:
            continue
        before = text[max(start - _LONGEST_NAME, done) : start]
        after = _AFTER.match(text, end, end + _LONGEST_NAME)
        assert after, "the pattern matches the empty string"
        done = after.end()
        word = before[len(before.rstrip(_WORD)) :] + text[start:done]
        value = _VALUE.match(text, done)
        if value is None or not is_secret_name(word):
            continue
        # Two words apart are a name and its value only after an option: `--api-key abc`.
        if value["join"].isspace() and (not word.startswith("-") or value["value"].startswith("-")):
            continue
        quote = len(value["value"]) - len(value["value"].lstrip("\\\"'"))
        first, last = value.start("value") + quote, value.end("value") - min(quote, 2)
        if first < last and not _EMPTY.fullmatch(text[first:last]):
            yield Secret(word.lstrip("-"), first, last)


def _by_shape(text: str) -> Iterator[Secret]:
    for literal, pattern in _SHAPES:
        if literal not in text:
            continue
        for shape in pattern.finditer(text):
            part = shape.lastgroup or 0
            if not _EMPTY.fullmatch(shape[part]):
                yield Secret(UNNAMED, shape.start(part), shape.end(part))


def mask_text(text: str) -> str:
    """`text` (a command line, a log line) with every secret value replaced by `***`."""
    parts: list[str] = []
    at = 0
    for secret in find_in_text(text):
        parts += [text[at : secret.start], MASK]
        at = secret.end
    return "".join([*parts, text[at:]])


def mask_value(name: str, value: object) -> object:
    """`value` of the key `name` without secrets: masked whole where the name says so, searched inside otherwise."""
    if isinstance(value, str):
        return MASK if is_secret_name(name) and not _EMPTY.fullmatch(value) else mask_text(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {str(k): mask_value(str(k), v) for k, v in pairs.items()}
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return [mask_value(name, v) for v in items]
    return value


def allowed_env(env: Mapping[str, object]) -> dict[str, str]:
    """The variables of `env` that a capture may keep, by name, secrets in them masked."""
    return {k: str(mask_value(k, str(v))) for k, v in sorted(env.items()) if _ENV_ALLOWED.fullmatch(k)}
