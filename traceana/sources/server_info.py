"""What a server was told and what it made of it: /server_info, server_args in a log, the command line, model files."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import cast

from traceana.sources.sidecar import Sidecar

__all__ = [
    "ARGUMENTS",
    "arguments_of_command",
    "arguments_of_log",
    "effective_state",
    "layer_split",
    "merged_info",
    "model_shape",
    "split_command",
]

# SGLang's names of what a report uses. Values keep the type they have there; absent means unknown, None means unset.
ARGUMENTS = (
    "pp_size", "tp_size", "dp_size", "ep_size", "pp_async_batch_depth", "pp_max_micro_batch_size",
    "max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "disable_overlap_schedule",
    "disable_cuda_graph", "enable_mixed_chunk", "enable_dynamic_chunking", "attention_backend", "moe_runner_backend",
    "moe_a2a_backend", "sampling_backend", "nnodes", "base_gpu_id", "gpu_id_step", "host", "model_path",
    "quantization", "dtype", "kv_cache_dtype", "mem_fraction_static", "schedule_policy", "decode_log_interval",
    "speculative_algorithm", "pp_layer_partition",
)  # fmt: skip
_ALIASES = {
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "pp": "pp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "model": "model_path",
}
_INTEGER = frozenset(n for n in ARGUMENTS if n.endswith(("_size", "_id", "_step"))) | {
    "pp_async_batch_depth", "max_running_requests", "max_prefill_tokens", "nnodes", "decode_log_interval",
}  # fmt: skip
_MOST_STAGES = 4096  # more is a damaged file, not a pipeline
_FLAG = re.compile(r"(?<!\S)--([a-z][a-z0-9-]*)(?:[= ]+(?!--)(\"[^\"]*\"|'[^']*'|\S+))?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)\s+")


def arguments_of_log(text: str) -> dict[str, object]:
    """ARGUMENTS in a `server_args=ServerArgs(...)` or `server_args={...}` message."""
    found: dict[str, object] = {}
    for name in ARGUMENTS:
        match = re.search(
            rf"[\s({{,]'?{name}'?(?:=|: ?)('(?:[^'\\]|\\.)*'|None|True|False|-?\d+(?:\.\d+)?)(?=[,)}}])", text
        )
        if match:
            found[name] = ast.literal_eval(match[1])
    return found


def arguments_of_command(command: str) -> dict[str, object]:
    """ARGUMENTS among the options of a command line; the last of two counts, as argparse has it."""
    found: dict[str, object] = {}
    for option, raw in _FLAG.findall(command):
        name = str(option).replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in ARGUMENTS:
            continue
        value = str(raw).strip("\"'")
        if name in _INTEGER:
            if re.fullmatch(r"-?\d{1,18}", value):
                found[name] = int(value)
        else:
            found[name] = value or True
    return found


def split_command(text: str) -> tuple[dict[str, str], str]:
    """Environment assignments before a command, and the command: `A=1 python -m x` is ({"A": "1"}, "python -m x")."""
    env: dict[str, str] = {}
    at = 0
    while match := _ASSIGNMENT.match(text, at):
        env[match[1]] = match[2].strip("\"'")
        at = match.end()
    return env, text[at:].strip()


def effective_state(info: Mapping[str, object]) -> dict[str, object]:
    """The first scheduler's own state (PP0 answers for all stages), empty where the server does not give it."""
    states = info.get("internal_states")
    if isinstance(states, list) and states and isinstance(states[0], dict):
        return cast("dict[str, object]", states[0])
    return {}


def model_shape(config: Mapping[str, object]) -> dict[str, int | None]:
    """layers, hidden, experts and top_k of a Hugging Face config.json; None where it does not say."""
    inner = config.get("text_config")
    text = cast("Mapping[str, object]", inner) if isinstance(inner, dict) else config

    def first(*names: str) -> int | None:
        values = (text.get(n) for n in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    return {
        "layers": first("num_hidden_layers", "n_layer", "num_layers"),
        "hidden": first("hidden_size", "n_embd", "d_model"),
        "experts": first("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        "top_k": first("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k"),
    }


def layer_split(layers: int | None, pp_size: int | None, partition: str | None) -> tuple[list[int] | None, str | None]:
    """Layers of each stage, and what says so. SGLang's rule gives each stage layers // pp_size, and one more to each of
    the last layers % pp_size stages."""
    if pp_size is None or not 1 <= pp_size <= _MOST_STAGES:
        return None, None
    if partition:
        parts = [int(p) for p in re.findall(r"\d{1,6}", partition)]
        if len(parts) == pp_size and (layers is None or sum(parts) == layers):
            return parts, "SGLANG_PP_LAYER_PARTITION"
        return None, f"SGLANG_PP_LAYER_PARTITION={partition} does not fit {pp_size} stages and {layers} layers"
    if layers is None:
        return None, None
    base, more = divmod(layers, pp_size)
    return [base + (stage >= pp_size - more) for stage in range(pp_size)], "SGLang's rule for the model's layers"


def merged_info(sidecars: Sequence[Sidecar]) -> tuple[dict[str, object], list[str]]:
    """The first /server_info, and the names of ARGUMENTS in which a later one differs from it."""
    documents = [cast("dict[str, object]", s.json) for s in sidecars]
    if not documents:
        return {}, []
    first, state = documents[0], effective_state(documents[0])
    differ = {
        n
        for other in documents[1:]
        for n in ARGUMENTS
        if other.get(n) != first.get(n) or effective_state(other).get(n) != state.get(n)
    }
    return first, sorted(differ)
