"""Kernel names of real traces and the class each belongs to."""

from __future__ import annotations

import pytest

from traceana.model.kernel_classes import CLASSES, RULES, classify, is_communication


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fused_moe_kernel", "moe"),
        ("void moe_align_block_size_kernel<int>(int const*, int*)", "moe"),
        ("_router_triton_kernel", "moe"),
        ("triton_per_fused_copy__mul_sum_0", "moe"),
        ("void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16>(x)", "moe"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu", "moe"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x8x512", "moe"),
        ("void deep_ep::internode_ll::dispatch<true>(void*)", "moe"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("_fwd_kernel_stage2", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("kernel_unified_attention_3d", "attention"),
        ("void (anonymous namespace)::fused_rope_store_kernel<true>(x)", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(x)", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV", "gemm"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(x)", "norm"),
        ("void (anonymous namespace)::fused_qknorm_warp<128l>(x)", "norm"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>(x)", "sampling"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(x)",
            "sampling",
        ),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(x)", "collective"),
        ("Memcpy DtoH (Device -> Pageable)", "memory"),
        ("Memset (Device)", "memory"),
        ("some_kernel_nobody_knows", "other"),
    ],
)
def test_class_of_a_kernel(name: str, expected: str) -> None:
    assert classify([name]) == {name: expected}


def test_every_rule_names_a_class() -> None:
    assert {cls for cls, _ in RULES} | {"other"} == set(CLASSES)


def test_communication_is_what_spins() -> None:
    assert is_communication("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    assert not is_communication("fused_moe_kernel")
