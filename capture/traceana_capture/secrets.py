"""Keeps secrets out of a capture: what is masked in server facts, command lines and logs, what environment is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

__all__ = ["allowed_environment", "mask_command", "mask_text", "mask_value"]

MASK = "***"

_NAME = re.compile(
    r"(?i)(?:passwo?r?d|passphrase|secret|credential|authorization|api[-_]?key|private[-_]?key"
    r"|(?:^|[-_.a-z])token$|(?:^|[-_.])(?:pat|pwd)$|[-_]key$)"
)
# PWD is the shell's folder; the others are marks of a tokenizer, or counts.
_NOT_NAME = re.compile(
    r"(?i)^(?:old)?pwd$|(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|stop|per|num|new)[-_]?token$"
)
_SHAPE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bAKIA[A-Z0-9]{16}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
)
_ADDRESS = re.compile(r"(://[^\s:/@\"']{0,100}:)[^\s/@\"']+(@)")
_BEARER = re.compile(r"(\b[Bb]earer\s+)[\w.~+/=-]{8,}")
_OPTION = re.compile(
    r"(?P<name>--?[A-Za-z][\w.-]*)(?P<join>=|\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;)}\]\-][^\s,;)}\]]*)"
)
_PAIR = re.compile(
    r"""(?P<name>["']?\b[A-Za-z_][\w.-]*["']?)(?P<join>\s{0,2}[=:]\s{0,2})(?P<value>"[^"]*"|'[^']*'|[^\s,;(){}\[\]"'=]+=*)"""
)
_EMPTY = re.compile(r"(?i)[\"']?(?:none|null|false|true|\*\*\*|[-+]?[\d.]{1,12})?[\"']?")

# Variables that explain a server's speed. All others stay out: a list of what to leave out always misses one.
_ENVIRONMENT = re.compile(
    r"(?:SGLANG_|SGL_|NCCL_|NVSHMEM_|TORCH_|TORCHINDUCTOR_|PYTORCH_|TRITON_|CUDA_|FLASHINFER_|DEEPEP_|OMP_|GLOO_|VLLM_)\w*"
    r"|CUDAHOSTCXX|PYTHONUNBUFFERED|PYTHONWARNINGS|PYTHONPATH|LD_LIBRARY_PATH"
)


def _secret_name(name: str) -> bool:
    bare = name.strip("\"'").lstrip("-")
    return bool(_NAME.search(bare)) and not _NOT_NAME.search(bare)


def _masked_pair(match: re.Match[str]) -> str:
    value = match["value"]
    if not _secret_name(match["name"]) or _EMPTY.fullmatch(value):
        return match[0]
    quote = value[0] if value[:1] in "\"'" else ""
    return f"{match['name']}{match['join']}{quote}{MASK}{quote}"


def mask_text(text: str) -> str:
    """`text` with every value that stands after a secret's name, or looks like a secret, replaced by `***`."""
    text = _SHAPE.sub(MASK, text)
    text = _ADDRESS.sub(rf"\1{MASK}\2", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _OPTION.sub(_masked_pair, text)
    return _PAIR.sub(_masked_pair, text)


def mask_command(command: Sequence[str]) -> list[str]:
    """A command's words, with the word after an option such as `--api-key` masked."""
    out: list[str] = []
    secret_next = False
    for word in command:
        out.append(MASK if secret_next and not word.startswith("--") else mask_text(word))
        secret_next = word.startswith("-") and "=" not in word and _secret_name(word)
    return out


def mask_value(name: str, value: object) -> object:
    """`value` of the key `name` without secrets: masked whole where the name says so, searched inside otherwise."""
    if isinstance(value, str):
        return MASK if _secret_name(name) and value and not _EMPTY.fullmatch(value) else mask_text(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {str(k): mask_value(str(k), v) for k, v in pairs.items()}
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        if items and all(isinstance(i, str) for i in items) and str(items[0])[:1] not in "{[":
            return mask_command([str(i) for i in items]) if not _secret_name(name) else [MASK for _ in items]
        return [mask_value(name, v) for v in items]
    return value


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a capture may keep, secrets in them masked."""
    kept = {k: v for k, v in sorted(environment.items()) if _ENVIRONMENT.fullmatch(k)}
    return {k: str(mask_value(k, v)) for k, v in kept.items()}
