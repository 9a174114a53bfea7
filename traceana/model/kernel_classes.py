"""Kernel classes as data: one table of rules, most specific first; the first that matches names the class.

Names were taken from SGLang 0.5.x and vLLM traces on NVIDIA and AMD GPUs and from the two projects' sources. Attention
stands before gemm because FlashAttention kernels are `cutlass::device_kernel<flash::...>`; MoE stands before both
because several backends run grouped gemms. To teach traceana a kernel, add a rule here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["CLASSES", "RULES", "classify", "is_communication"]

CLASSES = ("moe", "attention", "gemm", "norm", "sampling", "collective", "memory", "other")

RULES: tuple[tuple[str, str], ...] = (
    # Communication first: its kernels carry element types and operation names that other rules would match.
    ("collective", r"^nccl|ncclDev|ncclKernel|rccl|mscclpp|nvshmem"),
    ("collective", r"cross_device_reduce|all_?reduce|allgather|all_gather|reduce_scatter|reducescatter"),
    ("collective", r"multimem_|mnnvl|quickreduce|two_shot|one_shot|deep_ep::.*(notify|barrier)"),
    # MoE: routing, permutation, grouped gemm, activation between the two gemms, combination.
    ("moe", r"deep_ep::|moe|MoE|expert|Expert|_router_|router_triton|fused_router"),
    ("moe", r"topk_?gating|topkGating|_topk_forward|grouped_topk|biased_grouped_topk|_combined_routing|_sum_bitmatrix"),
    ("moe", r"matmul_ogs|_finalize_matmul_scatter|bmm_.*(E2m1|E4m3|Bfloat16|MxE)|routingIndices|finalizeKernel"),
    ("moe", r"GroupProblemShape|group(ed)?_?gemm|GroupGemm|GemmUniversal.*Group|gemm_grouped|expandInputRows"),
    ("moe", r"doActivationKernel|finalizeMoeRouting|_fwd_kernel_ep_(scatter|gather)|silu_and_mul_(masked_)?post_quant"),
    ("moe", r"act_and_mul|silu_and_mul|gelu_and_mul|swiglu|triton_per_fused_copy__mul_sum|ep_moe|dpsk::"),
    # Attention, its cache and its metadata.
    ("attention", r"flash_?(attn|fwd|bwd|mla|infer.*(Decode|Prefill))|FlashAttn|flash::|fmha|Fmha|FMHA"),
    ("attention", r"paged_?attention|PagedKV|Batch(Decode|Prefill)With|MergeStates|unified_attention|attention_kernel"),
    (
        "attention",
        r"^_fwd_kernel(_stage[12]|_unified)?$|_fwd_grouped_kernel_stage1|reduce_segments|[mM]la_?(metadata|combine)",
    ),
    ("attention", r"gated_delta|\bgdn|causal_conv1d|chunk_(fwd|scan|state)|selective_scan|mamba|\bssd"),
    ("attention", r"rope|rotary|store_kv|store_kvcache|set_mla_kv|reshape_and_cache|kv_indices|num_kv_splits"),
    ("attention", r"prepare_varlen_num_blocks|concat_mla|kv_?cache"),
    # Normalisation before gemm: fused names may hold both.
    ("norm", r"rms_?norm|RMSNorm|Rmsnorm|layer_?norm|LayerNorm|qk_?norm|QKNorm|batch_norm"),
    # Matrix products, and the quantisation that exists only to feed them.
    ("gemm", r"nvjet|gemm|Gemm|GEMM|gemv|xmma|cutlass|cublas|Cijk_|splitK|wgmma|Marlin|marlin|matmul|deep_gemm"),
    ("gemm", r"per_(token|tensor).*quant|cvt_fp|quantize|conv2d|implicit_convolve"),
    # Sampling of the next token.
    (
        "sampling",
        r"[sS]ampl|SoftMax|softmax|ArgMax|argmax|multinomial|top_?[kp]|TopK|TopP|distribution_(elementwise|nullary)",
    ),
    ("sampling", r"apply_(token|penalt)|MinP|min_p|Philox|exponential_kernel|logits"),
    # Copies and fills, whether kernels or engine activities.
    ("memory", r"^Mem(cpy|set)|memcpy|memset|direct_copy|copy_kernel|CatArray|FillFunctor|fill_|index_put|indexSelect"),
    ("memory", r"index_(elementwise_)?kernel|gather_kernel|scatter|transpose|embedding|multi_tensor_apply.*Copy"),
    ("memory", r"write_req_to_token_pool|compute_position|clamp_position|alloc_(extend|decode)|resolve_future_token"),
)

_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in RULES)
_COMMUNICATION = re.compile(r"^(nccl|rccl)|ncclDev|ncclKernel")


def classify(names: Iterable[str]) -> dict[str, str]:
    """Class of each kernel name, one of CLASSES; `other` where no rule matches."""
    out: dict[str, str] = {}
    for name in names:
        out[name] = next((cls for cls, pattern in _COMPILED if pattern.search(name)), "other")
    return out


def is_communication(name: str) -> bool:
    """An NCCL or RCCL kernel: it spins while it waits, so it is not work as a whole."""
    return _COMMUNICATION.search(name) is not None
