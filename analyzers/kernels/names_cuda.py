"""Kernels of NVIDIA's libraries and of those that everyone uses on its GPUs.

cuBLAS, cuBLASLt, CUTLASS, cuDNN, FlashAttention, FlashMLA, xFormers, DeepGEMM, bitsandbytes, NCCL, NVSHMEM. The
instruction stands in the name of a library's product: 884, 1688, 16816 are shapes of tensor-core instructions; `ffma`,
`simt` and `sgemm` are plain multiply-adds.
"""

from __future__ import annotations

from phaseprof.analyzers.kernels.kernel_table import table

COLLECTIVES = table(r"""
collective  no  vllm-b200, odd-launchless-kernels
    ^(nccl|rccl)(Dev)?Kernel|^nccl|mscclKernel|^rccl
collective  no  vllm-b200
    multimem_(all_reduce|all_gather|one_shot|reduce)|(one|two)_shot_all_reduce|symm_mem
collective  no  vLLM source (custom_all_reduce.cuh, quickreduce)
    cross_device_reduce|custom_all_?reduce|all_?reduce_(one|two)_?shot|quickreduce|allreduce_prototype
collective  no  TensorRT-LLM, FlashInfer source
    (one|two)ShotAllReduce|allreduce_fusion_kernel|lamport|moereduce_allreduce|userbuffers|mnnvl|MiniMaxReduceRMS
collective  no  DeepEP, NVSHMEM, TensorRT-LLM source
    nvshmem|deep_ep::|^(intranode|internode)(_ll)?::|notify_dispatch|cached_notify|moeAllToAll|moe_comm
    a2a_(pack|unpack)
collective  no  MSCCL++ source
    mscclpp|allreduce_(LL|packet|nvls)|allgather_|reduce_scatter
""")

ATTENTION = table(r"""
attention  no  FlashAttention, FlashMLA source
    flash_fwd_splitkv_combine|FlashAttnFwdCombine|flash_fwd_mla_combine|combine_attn
    ~FlashAttnFwdCombine|flash_fwd_mla_combine
attention  yes  hf-h100; FlashAttention 2, 3, 4 source
    flash_fwd|flash_bwd|flash_attn_cute|FlashAttn|FlashMLA|flash_mla|flash_mha
attention  yes  FlashAttention 3, 4, FlashMLA source
    ~FlashAttn(Fwd|Bwd|Mla)|flash::(enable_sm|Flash)|sm(90|100)::(fwd|decode|prefill)::|
    FlashAttentionForward(Sm\d+)?
attention  yes  torch source (memory-efficient attention), xFormers
    fmha_cutlass[FB]_(bf16|f16)
attention  unknown  torch source (memory-efficient attention)
    fmha_cutlass[FB]|AttentionKernel
attention  yes  torch source (cuDNN attention)
    cudnn_generated.*sdpa|cudnn.*(sdpa|fmha|flash)
attention  yes  cuDNN
    ~cudnn.*(sdpa|flash)
attention  yes  cuDNN, TensorRT
    mha_fwd|fmha_(fprop|v2)|fused_?multihead_?attention
""")

GEMM = table(r"""
convolution  no  old-2021-schema
    (?i)winograd|implicit_convolve_sgemm|explicit_convolve_sgemm|scudnn|[wd]grad_(alg0_)?engine|im2col4d
convolution  yes  cuDNN
    (xmma|cutlass|cudnn).*(fprop|dgrad|wgrad).*(tf32|f16|bf16|i8|1688|16816)
convolution  unknown  cuDNN
    xmma_(fprop|dgrad|wgrad)|(fprop|dgrad|wgrad)|cudnn.*conv|conv2d_grouped|convolve
convolution  no  old-2021-schema
    cask_cudnn::compute.*Offsets|nchwToNhwc|nhwcToNchw
convolution  no  cuDNN
    cudnn::.*pooling|pooling_(fw|bw)
norm  no  old-2021-schema
    cudnn.*(bn_(fw|bw)|norm)|bn_(fw|bw)_
reduction  no  cuDNN
    cudnn.*(softmax|reduce)
elementwise  no  old-2021-schema
    cudnn::(ops|detail)::
gemm  yes  vllm-b200 (cuBLASLt, Hopper and later)
    ^nvjet_
gemm  no  nsys-h100 (fp32 without TF32)
    xmma_.*(ffma|simt)
gemm  yes  hf-h100
    xmma_.*(tf32|bf16|f16|e4m3|e5m2|i8|imma|hmma|dmma)
gemm  unknown  cuBLAS
    xmma_
gemm  yes  odd-launchless-kernels; cuBLAS names since Volta
    (884|1688|16816|16832|8816|16864)(gemm|bgemm|_gemm)
gemm  yes  odd-launchless-kernels (TF32)
    ~cutlass.*(884|1688|16816|16832|8816|16864|tensorop)\w*gemm
gemm  no  hf-h100
    ~cutlass.*simt\w*gemm
gemm  no  odd-launchless-kernels, old-2021-schema
    (maxwell|pascal|volta|turing|ampere|hopper)_(s|d|c|z|h|sc|i)gemm
gemm  yes  cuBLAS
    (volta|turing|ampere|hopper|blackwell)_(fp16|bf16|int8|tf32)_\w*gemm
gemm  no  odd-launchless-kernels (cuBLAS, matrix and vector)
    gemv|dot_kernel|reduce_1Block|gemmk1|gemmSN|gemm_kernel1x1|asum_kernel|scal_kernel|axpy_kernel
gemm  no  odd-launchless-kernels, old-2021-schema
    (?i)split_?k_?reduce
gemm  no  torch source (linear algebra)
    magma_?(s|d|c|z)gemm|cublas.*(trsm|trmm|syrk)|trsm|getrf|potrf|cusolver
gemm  yes  DeepGEMM source
    deep_gemm::|fp8_gemm_kernel|(sm90|sm100)_(fp8|bf16|m_grouped|tf32)_\w*gemm
    ~deep_gemm::\w*(gemm|einsum)
gemm  no  bitsandbytes source
    kgemm_4bit_inference_naive|kgemv_4bit
quantization  no  bitsandbytes source
    k(Dequantize|Quantize)Blockwise|kDoubleRowColQuant|kInt8VectorQuant|kdequant_mm
gemm  yes  CUTLASS 3 source (vLLM, torch)
    ~cutlass::.*(GemmUniversal|gemm::kernel|Gemm.*Sm(8|9|10|12)\d|MainloopSm|CollectiveMma|DefaultGemm).*(Sm80|Sm90|
    Sm100|Sm120|TensorOp|SM(80|90|100)_|Gmma|GMMA|warpspecialized|WarpSpecialized|UMMA|half_t|bfloat16_t|
    float_e[245]m|int8)
gemm  unknown  CUTLASS source
    ~cutlass::.*[Gg]emm
gemm  unknown  cuBLAS, CUTLASS
    cublas|cutlass.*gemm
""")
