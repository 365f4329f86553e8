"""Names of kernels and operators: their class and tensor cores, on names as profilers print them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phaseprof.analyzers.kernels.kernel_classes import (
    KERNEL_TABLES,
    OPERATOR_TABLES,
    WORDS,
    classify,
    classify_names,
    own_name,
    short_name,
)
from phaseprof.analyzers.kernels.kernel_results import KernelClass, TensorCores
from phaseprof.analyzers.kernels.kernel_table import table

C, T = KernelClass, TensorCores

#: Written by hand from what each kernel is known to do, not from the tables.
KERNELS = [
    # cuBLAS and cuBLASLt
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", C.GEMM, T.YES),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", C.GEMM, T.YES),
    ("ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_nn", C.GEMM, T.YES),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", C.GEMM, T.YES),
    ("volta_h884gemm_64x128_ldg8_nn", C.GEMM, T.YES),
    ("ampere_sgemm_32x128_tn", C.GEMM, T.NO),
    ("volta_dgemm_64x64_nn", C.GEMM, T.NO),
    (
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x16_stage4_warpsize2x2x1",
        C.GEMM,
        T.YES,
    ),
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma",
        C.GEMM,
        T.NO,
    ),
    ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_cublas", C.GEMM, T.YES),
    ("sm89_xmma_gemm_e4m3f32_e4m3f32_f32_tn_n_tilesize128x64x64_stage3", C.GEMM, T.YES),
    (
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4>(int)",
        C.GEMM,
        T.NO,
    ),
    ("void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, float, 1, 32, 4, 1024>(int)", C.GEMM, T.NO),
    (
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)",
        C.GEMM,
        T.NO,
    ),
    # CUTLASS
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(int)",
        C.GEMM,
        T.YES,
    ),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(int)", C.GEMM, T.NO),
    (
        "void cutlass::device_kernel<vllm::enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int,"
        " int, int, int>, cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarp"
        "SpecializedFP8<4>>>>>(int)",
        C.GEMM,
        T.YES,
    ),
    # attention
    (
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, true>(flash::Flash_fwd_params)",
        C.ATTENTION,
        T.YES,
    ),
    (
        "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, 8>(int)",
        C.ATTENTION,
        T.NO,
    ),
    (
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>"
        "(flash::FlashAttnFwdSm90::Params)",
        C.ATTENTION,
        T.YES,
    ),
    (
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at_",
        C.ATTENTION,
        T.YES,
    ),
    (
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(MaskMode)1>, int>(int)",
        C.ATTENTION,
        T.YES,
    ),
    (
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>(int)",
        C.ATTENTION,
        T.NO,
    ),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(AttentionKernel::Params)", C.ATTENTION, T.YES),
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
        C.ATTENTION,
        T.YES,
    ),
    (
        "void vllm::paged_attention_v2_kernel<unsigned short, unsigned short, 128, 16>(float*)",
        C.ATTENTION,
        T.NO,
    ),
    ("kernel_unified_attention_2d", C.ATTENTION, T.YES),
    ("_fwd_grouped_kernel_stage1", C.ATTENTION, T.YES),
    ("reduce_segments", C.ATTENTION, T.NO),
    ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128", C.ATTENTION, T.YES),
    # mixture of experts
    ("fused_moe_kernel", C.MOE, T.YES),
    ("void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>(float const*)", C.MOE, T.NO),
    ("void vllm::moe::moe_align_block_size_kernel<int>(int const*)", C.MOE, T.NO),
    ("void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*)", C.MOE, T.NO),
    ("void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256>(int)", C.MOE, T.YES),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu", C.MOE, T.YES),
    # the rest of a layer
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)", C.NORM, T.NO),
    (
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)",
        C.NORM,
        T.NO,
    ),
    (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)",
        C.NORM,
        T.NO,
    ),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", C.ROPE, T.NO),
    (
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel<true, 128u>(__nv_bfloat16*)",
        C.ROPE,
        T.NO,
    ),
    (
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(int)",
        C.ACTIVATION,
        T.NO,
    ),
    (
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(int)",
        C.KV_WRITE,
        T.NO,
    ),
    (
        "void vllm::copy_blocks_kernel<c10::BFloat16>(long*, long*, long const*, int)",
        C.KV_WRITE,
        T.NO,
    ),
    (
        "void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn>(int)",
        C.QUANTIZATION,
        T.NO,
    ),
    ("_per_token_group_quant_fp8", C.QUANTIZATION, T.NO),
    # weights packed in fewer bits
    (
        "void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8>(int4 const*)",
        C.GEMM,
        T.YES,
    ),
    ("void vllm::gptq::gemm_half_q_half_gptq_4bit_kernel<true, 8>(__half const*)", C.GEMM, T.NO),
    ("void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>(int, int, int)", C.GEMM, T.NO),
    ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)", C.QUANTIZATION, T.NO),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u>(float*)", C.GEMM, T.YES),
    # collectives
    (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        C.COLLECTIVE,
        T.NO,
    ),
    (
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)",
        C.COLLECTIVE,
        T.NO,
    ),
    (
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(int)",
        C.COLLECTIVE,
        T.NO,
    ),
    # from logits to tokens
    (
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, true>(float*)",
        C.SAMPLING,
        T.NO,
    ),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned"
        " int, long, 4, 4> >(at::native::ReduceOp<float>)",
        C.SAMPLING,
        T.NO,
    ),
    (
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long)",
        C.SAMPLING,
        T.NO,
    ),
    ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(int)", C.SORT, T.NO),
    ("void at_cuda_detail::cub::DeviceSegmentedRadixSortKernel<int>(int)", C.SORT, T.NO),
    # state-space models and linear attention
    (
        "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16>>(SSMParamsBase)",
        C.SCAN,
        T.NO,
    ),
    (
        "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4>>(ConvParamsBase)",
        C.SCAN,
        T.NO,
    ),
    ("_chunk_scan_fwd_kernel", C.SCAN, T.YES),
    ("fused_recurrent_gated_delta_rule_fwd_kernel", C.SCAN, T.NO),
    # torch, eager and compiled
    (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*)",
        C.REDUCTION,
        T.NO,
    ),
    (
        "void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float> >(float*)",
        C.REDUCTION,
        T.NO,
    ),
    (
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<int>>(long)",
        C.INDEXING,
        T.NO,
    ),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", C.NORM, T.NO),
    ("triton_per_fused__softmax_3", C.REDUCTION, T.NO),
    ("triton_poi_fused_mul_silu_2", C.ACTIVATION, T.NO),
    ("triton_poi_fused_add_clamp_div_4", C.ELEMENTWISE, T.NO),
    ("triton_poi_fused_clone_1", C.COPY, T.NO),
    ("triton_tem_fused_mm_5", C.GEMM, T.UNKNOWN),
    ("triton_tem_fused_flex_attention_2", C.ATTENTION, T.UNKNOWN),
    # AMD
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN", C.GEMM, T.YES),
    ("_ZN5aiter42pa_bf16_pertokenFp8_gqa10_1tg_4w_mtp3_msk1E", C.ATTENTION, T.YES),
    ("_ZN5aiter32fmha_fwd_hd192_hd128_bf16_causalE", C.ATTENTION, T.YES),
    ("_ZN5aiter50fmoe_bf16_pertokenMXfp4_g1u1_flat_novs_silu_16x128E", C.MOE, T.YES),
    ("_ZN5aiter33f4gemm_bf16_per1x32Fp4_tn_256x256E", C.GEMM, T.YES),
    ("void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int)", C.GEMM, T.NO),
    # the driver
    ("Memcpy HtoD (Pinned -> Device)", C.COPY, T.NO),
    ("Memset (Device)", C.COPY, T.NO),
    # words alone, and nothing
    ("my_company_attention_v7", C.ATTENTION, T.UNKNOWN),
    ("fbgemm_gpu::permute_2D_data_kernel", C.INDEXING, T.NO),
    ("zzz", C.OTHER, T.UNKNOWN),
    ("", C.OTHER, T.UNKNOWN),
]

OPERATORS = [
    ("aten::linear", C.GEMM),
    ("aten::addmm", C.GEMM),
    ("aten::bmm", C.GEMM),
    ("aten::baddbmm_", C.GEMM),
    ("aten::_int_mm", C.GEMM),
    ("mkldnn::_linear_pointwise", C.GEMM),
    ("quantized::linear_dynamic", C.GEMM),
    ("onednn::qlinear_pointwise", C.GEMM),
    ("aten::scaled_dot_product_attention", C.ATTENTION),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", C.ATTENTION),
    ("aten::_grouped_mm", C.MOE),
    ("aten::layer_norm", C.NORM),
    ("aten::rms_norm", C.NORM),
    ("aten::silu", C.ACTIVATION),
    ("aten::gelu", C.ACTIVATION),
    ("aten::mul", C.ELEMENTWISE),
    ("aten::rsqrt", C.ELEMENTWISE),
    ("aten::add_", C.ELEMENTWISE),
    ("aten::mean", C.REDUCTION),
    ("aten::softmax", C.REDUCTION),
    ("aten::norm", C.REDUCTION),
    ("aten::embedding", C.EMBEDDING),
    ("aten::index", C.INDEXING),
    ("aten::index_put_", C.INDEXING),
    ("aten::masked_fill", C.INDEXING),
    ("aten::topk", C.SORT),
    ("aten::argmax", C.SAMPLING),
    ("aten::multinomial", C.SAMPLING),
    ("aten::cat", C.COPY),
    ("aten::copy_", C.COPY),
    ("aten::to", C.COPY),
    ("aten::item", C.COPY),
    ("aten::view", C.VIEW),
    ("aten::transpose", C.VIEW),
    ("aten::empty", C.VIEW),
    ("aten::conv1d", C.CONVOLUTION),
    ("aten::fake_quantize_per_tensor_affine", C.QUANTIZATION),
    ("c10d::allreduce_", C.COLLECTIVE),
    ("_C::rms_norm", C.NORM),
    ("_C::fused_add_gemma_rms_norm", C.NORM),
    ("_C::silu_and_mul", C.ACTIVATION),
    ("_C::rotary_embedding", C.ROPE),
    ("_C::onednn_mm", C.GEMM),
    ("_C::cpu_attention_with_kv_cache", C.ATTENTION),
    ("_C::cpu_attn_reshape_and_cache", C.KV_WRITE),
    ("_C::cpu_fused_moe", C.MOE),
    ("_C::shm_allreduce", C.COLLECTIVE),
    ("_C::causal_conv1d_fwd_cpu", C.SCAN),
    ("_C::dynamic_scaled_int8_quant", C.QUANTIZATION),
    ("_C::greedy_argmax", C.SAMPLING),
    ("vllm::unified_attention_with_output", C.ATTENTION),
    ("mine::flash_mha_forward", C.ATTENTION),
    ("aten::zzz", C.OTHER),
]


@pytest.mark.parametrize(
    ("name", "kernel_class", "cores"), KERNELS, ids=[name[:50] for name, _, _ in KERNELS]
)
def test_class_of_a_kernel(name: str, kernel_class: KernelClass, cores: TensorCores) -> None:
    kind = classify(name)
    assert (kind.kernel_class, kind.tensor_cores) == (kernel_class, cores)


@pytest.mark.parametrize(("name", "kernel_class"), OPERATORS)
def test_class_of_an_operator(name: str, kernel_class: KernelClass) -> None:
    kind = classify(name, on_cpu=True)
    assert kind.kernel_class is kernel_class
    assert kind.tensor_cores is not TensorCores.YES


def test_every_class_has_a_name_in_a_table() -> None:
    of_kernels = {rule.kernel_class for rules in KERNEL_TABLES for rule in rules}
    of_operators = {rule.kernel_class for rules in OPERATOR_TABLES for rule in rules}
    assert of_kernels == set(KernelClass) - {C.OTHER, C.VIEW}
    assert of_operators == set(KernelClass) - {C.OTHER}


def test_every_rule_says_where_it_was_seen() -> None:
    rules = [rule for rules in (*KERNEL_TABLES, *OPERATOR_TABLES, WORDS) for rule in rules]
    assert all(rule.seen.strip() for rule in rules)
    # A pattern that matches nothing at all, or everything, is a slip of the pen.
    assert [rule.pattern.pattern for rule in rules if rule.pattern.search("")] == []


def test_the_docs_list_every_class() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(KernelClass)


def test_a_copy_of_the_driver_is_told_from_a_kernel_that_copies() -> None:
    assert classify("Memcpy DtoD (Device -> Device)").driver_copy
    assert not classify("void vllm::copy_blocks_kernel<float>(long*)").driver_copy


def test_a_guess_by_a_word_is_told_from_a_name_that_was_seen() -> None:
    assert classify("my_company_attention_v7").by_word
    assert not classify("reduce_segments").by_word


def test_names_keep_their_order() -> None:
    names = ["Memset (Device)", "zzz", "fused_moe_kernel"]
    assert [kind.kernel_class for kind in classify_names(names)] == [C.COPY, C.OTHER, C.MOE]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (
            "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)",
            "vllm::rms_norm_kernel",
        ),
        (
            "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
            "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)",
            "vllm::fused_add_rms_norm_kernel",
        ),
        (
            "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64EEEvPT0_",
            "aiter::add_rmsnorm_quant_kernel",
        ),
        ("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdE", "ck_tile::kentry"),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*)", "softmax_warp_forward"),
        ("void <unnamed>::softmax_warp_forward<float>(T2 *)", "softmax_warp_forward"),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllGather_RING_LL",
        ),
        ("fused_moe_kernel.kd", "fused_moe_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("", ""),
        ("_Z", "_Z"),
        ("void f<", "f"),
    ],
)
def test_own_name(name: str, own: str) -> None:
    assert own_name(name) == own


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)",
            "vllm::rms_norm_kernel",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(int)",
            "cutlass_80_simt_sgemm_128x32_8x5_nn_align1",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, char* >(int)",
            "Fill (vectorized_elementwise_kernel)",
        ),
        ("aten::linear", "aten::linear"),
    ],
)
def test_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_table_reads_what_it_says() -> None:
    rules = table(
        r"""
# a comment
gemm  yes  somewhere
    ~first(a|
    b)
    second
other  unknown  elsewhere
    third
"""
    )
    assert [
        (r.kernel_class, r.tensor_cores, r.pattern.pattern, r.whole, r.seen) for r in rules
    ] == [
        (C.GEMM, T.YES, "first(a|b)", True, "somewhere"),
        (C.GEMM, T.YES, "second", False, "somewhere"),
        (C.OTHER, T.UNKNOWN, "third", False, "elsewhere"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "gemm  yes",
        "gemm  perhaps  somewhere",
        "no class  yes  somewhere",
        "    a pattern",
        "gemm  yes  somewhere\n    half|",
        "gemm  yes  somewhere\n    (",
    ],
)
def test_a_table_with_a_slip_does_not_load(text: str) -> None:
    with pytest.raises((ValueError, re.error)):
        table(text)
