"""Kernels of AMD's libraries: hipBLASLt and rocBLAS (Tensile), composable kernel, aiter, vLLM's kernels for ROCm.

"Tensor cores" are the matrix cores there: MFMA and WMMA instructions. `MI` in a Tensile name is the matrix instruction.
Names may be mangled (`_ZN5aiter…`): their own name is then read out of the mangling.
"""

from __future__ import annotations

from phaseprof.analyzers.kernels.kernel_table import table

ROCM = table(r"""
gemm  yes  sglang-mi300x, vllm-mi300x (hipBLASLt, rocBLAS)
    ^Cijk_\w*_MI(16|32|4)x
gemm  no  rocBLAS source (without matrix instruction)
    ^Cijk_\w*(_VALU|_MT\w*_TT)
gemm  unknown  rocBLAS source
    ^Cijk_|rocblas|hipblas|Tensile
norm  no  vllm-mi300x
    ~ck_tile.*(Rmsnorm|Layernorm|AddRmsnorm)
attention  no  composable kernel source
    ~ck_tile.*(Fmha\w*(Combine|AppendKV)|UnifiedAttentionReduce)
attention  yes  sglang-mi300x
    ~ck_tile.*(Fmha|UnifiedAttention|FlashAttention)
moe  no  composable kernel source
    ~ck_tile.*(MoeSorting|TopkSoftmax|MoeSmoothquant)
moe  yes  composable kernel source
    ~ck_tile.*(FusedMoe|MoeFlatmm|GroupedGemm)
quantization  no  composable kernel source
    ~ck_tile.*(Smoothquant|Quant(?!Gemm))
gemm  yes  composable kernel source
    ~ck_tile.*(Gemm|Flatmm|flatmm)
reduction  no  composable kernel source
    ~ck_tile.*(Reduce|Softmax)
elementwise  no  composable kernel source
    ~ck_tile.*(Elementwise|ElementWise|ImageToColumn|Permute|Transpose)
moe  yes  composable kernel source (as aiter builds it)
    ~\bck::.*(kernel_moe|moe_gemm|MoeGemm)
gemm  yes  composable kernel source
    ~\bck::.*([Gg]emm|xdl|wmma)
moe  no  aiter source
    aiter::.*(topk|moe_align|moe_sum|moe_sort|grouped_topk|MoeSort|moe_smooth|biased)
moe  yes  aiter source (assembly)
    aiter::.*(fmoe|moe)
attention  yes  aiter source (assembly)
    aiter::.*(fmha|mla_(a|pfl|dec|stage1|v\d)|pa_(bf16|fp16|fp8|a)|fwd_hd|flash|fwd_(fp8|bf16))
attention  no  aiter source
    aiter::.*(mla_reduce|kn_mla|kn_get_mla|pa_reduce|attention_reduce|mla)
attention  yes  vLLM source (csrc/rocm), aiter Triton
    paged_attention_ll4mi_QKV|_mfma(4|16)?_kernel
    pa_decode|kernel_unified_attention
    _paged_attn_\w*(decode|prefill)
norm  no  sglang-mi300x
    aiter::.*(?i:rms_?norm|layer_?norm|l2norm)
rope  no  aiter source
    aiter::.*(?i:rope|rotary|kn_entry_(1|2)c_(sbhd|thd|2d))
quantization  no  aiter source
    aiter::.*(?i:act\w*quant|quant|scaled)
activation  no  sglang-mi300x
    aiter::.*(?i:act_and_mul|silu|gelu|activation)|sgl_hip::activation
kv_write  no  aiter source
    aiter::.*(?i:reshape_and_cache|cache)
collective  no  aiter source
    aiter::.*(?i:reduce_scatter|all_?reduce|allgather|cross_device)
gemm  yes  aiter source (assembly)
    aiter::.*(?i:gemm|flatmm|preshuffle)
sampling  no  aiter source
    aiter::.*(?i:sampl|topp|mix_sample|argmax)
copy  no  aiter source
    aiter::.*(?i:transpose|batched_copy|concat)
gemm  yes  aiter Triton
    ^_?(batched_)?gemm_(a\w+|afp4)\w*kernel
    _gemm_a(8w8|16w16|16wfp4|8wfp4|fp4wfp4|16w8|16w4)|_batched_gemm
gemm  no  vLLM source (csrc/rocm, skinny matrices without MFMA)
    wvSplitK|LLMM1|LLGemm|LLMM_Silu
""")
