"""Kernels that torch itself launches: eager (`at::native`), its CUB and rocPRIM calls, and what inductor generates.

Recorded traces are named by their file in the folder of recorded traces. "torch source": aten/src/ATen/native/cuda and
torch/_inductor of torch 2.6 to 2.13.
"""

from __future__ import annotations

from phaseprof.analyzers.kernels.kernel_table import table

#: Copies and fills that the driver makes: activities of their own, no kernels.
DRIVER_COPIES = table(r"""
copy  no  every with a GPU
    ^Memcpy
    ^Memset
copy  no  Nsight Systems
    ^\[CUDA (memcpy|memset)
copy  no  ROCm source (clr)
    ^__amd_rocclr_(copy|fill)Buffer
""")

#: torch.compile: `triton_<kind>_fused_<operators>_<number>`, kind poi, per, red, tem, for, mm.
INDUCTOR = table(r"""
attention  unknown  torch source (inductor, flex attention)
    ^triton_(tem|flex)_.*(flex_attention|attention)
    ^triton_\w*flex_(attention|decoding)
convolution  unknown  torch source (inductor, templates)
    ^triton_tem_.*conv
gemm  unknown  torch source (inductor, templates)
    ^triton_(tem|mm|bmm)_
sampling  no  torch source (inductor)
    ^triton_(red|per)_.*(argmax|argmin|exponential|multinomial)
norm  no  torch source (inductor)
    ^triton_\w*(native_layer_norm|rms_norm)
norm  no  torch source (inductor), vLLM compiled
    ^triton_\w*(mean|var|pow|norm)\w*rsqrt
norm  no  torch source (inductor)
    ^triton_\w*rsqrt\w*(mean|var|pow|norm)
reduction  no  torch source (inductor)
    ^triton_(red|per|split_scan|spl)_
rope  no  torch source (inductor), vLLM compiled
    ^triton_\w*(rotary|(^|_)(cos|sin)_)
activation  no  torch source (inductor)
    ^triton_\w*(silu|gelu|swiglu|sigmoid_mul)
embedding  no  torch source (inductor)
    ^triton_\w*embedding
indexing  no  torch source (inductor)
    ^triton_\w*(index_put|index_copy|index_select|scatter|gather|index)
quantization  no  torch source (inductor)
    ^triton_\w*(quant|float8|dequant)
copy  no  vllm-mi300x
    ^triton_poi_fused_(_to_copy|clone|copy|cat|constant_pad_nd|stack|slice|view|_)+(\d+)?$
copy  no  torch source (inductor)
    ^triton_poi_fused_(_unsafe_view|transpose|clone|copy_|unsqueeze|expand|permute|zeros|_)+(\d+)?$
elementwise  no  vllm-b200, vllm-mi300x
    ^triton_(poi|for|unk)_
elementwise  no  odd-launchless-kernels (inductor of torch 2.0, names without content)
    ^triton__(0d|\d)
""")

#: Eager. What an element-wise kernel computes stands in its template arguments, so most look at the whole name.
EAGER = table(r"""
sampling  no  sglang-mi300x (greedy decoding's arg-max)
    ~reduce_kernel<.*Arg(Max|Min)Ops
sampling  no  torch source
    (sample|Sample)Multinomial|multinomial
sampling  no  torch source (exponential, uniform)
    distribution_elementwise_grid_stride_kernel
    distribution_(nullary|binary)
norm  no  torch source
    (vectorized_)?layer_norm|RowwiseMoments|LayerNormForward|[Rr]ms_?[Nn]orm
    GroupNorm
    batch_norm|batchnorm
reduction  no  nsys-h100, old-2021-schema
    (?i)softmax
sort  no  torch source (topk, sort)
    sbtopk|mbtopk|gatherTopK|radixFindKthValues|computeBlockwise
    computeDigitCumSum|bitonicSort|radixSort
sort  no  odd-launchless-kernels
    (?i)segmented_?sort|DeviceSegmentedRadixSort|DeviceRadixSort
    (?i)RadixSort|MergeSort|block_sort|block_merge
sort  no  torch source (sort on ROCm)
    ~rocprim.*(radix_sort|merge_sort|block_sort|onesweep|segmented_radix)
sort  no  torch source
    at::native::.*(sort|Sort|topk|TopK|kthvalue|median|mode)|fill_reverse_indices
    cuda_unique
copy  no  hf-h100, nsys-h100
    CatArrayBatchedCopy|chunk_cat|split_copy
copy  no  hf-h100, vllm-b200
    ~(direct_copy_kernel|copy_kernel_cuda|copy_device_to_device|FillFunctor|conj_kernel|float8_copy)
copy  no  torch source
    transpose|triu_tril|flip|roll_cuda|pad(_|ding)|constant_pad
embedding  no  hf-h100, vllm-b200 (nn.Embedding ends in it)
    indexSelect|vectorized_gather_kernel
    EmbeddingBag|embedding
indexing  no  vllm-b200
    ~index(_put|_copy|_fill|_add)?_kernel_impl|gpu_index_kernel
indexing  no  torch source
    index_elementwise|indexFunc|index_(put|add|copy|fill)|indexing_backward
    scatter_gather|_scatter|gather|take|masked_(scatter|select)|nonzero
indexing  no  torch source (nonzero, repeat_interleave)
    ~write_indices|flag_kernel|DeviceSelect
    ~DevicePartition|compute_cuda_kernel|searchsorted
    ~bucketize
gemm  yes  torch source (int4 weights)
    tinygemm_m16n8k16|int4_mm|weight_int4pack_mm
gemm  no  torch source
    at::native::.*gemv|dot_kernel
gemm  yes  torch source (grouped products of experts)
    ~at::cuda::detail::(f8f8bf16|bf16bf16|f4f4)_grouped
    ~GroupMM|grouped_mm
convolution  no  old-2021-schema
    conv_depthwise|im2col|col2im|vol2col|(max|avg|adaptive|average)_?pool
    upsample|grid_sampler|depthwise
reduction  no  hf-h100, odd-launchless-kernels
    reduce_kernel|DeviceReduce|tensor_kernel_scan
    scan_(inner|outer)most|DeviceScan|DeviceCompactInit
    ReduceByKey|histogram|Histogram|bincount
reduction  no  sglang-mi300x
    ~rocprim.*(scan|reduce|lookback|partition)
activation  no  hf-h100
    ~(silu_kernel|[Gg]elu|mish_kernel|hardswish|GLU|glu_kernel)
elementwise  no  odd-launchless-kernels, old-2021-schema
    multi_tensor_apply|fused_dropout|dropout_kernel
    nll_loss|cross_entropy|ClassNLLCriterion|cunn_
elementwise  no  hf-h100, nsys-h100
    elementwise_kernel|elementwise_with_index|elementwise_kernel_with_index
    thrust|range_|arange|linspace|fused_rng
    ~at::native::.*(Functor|pow_tensor|rsqrt|where_kernel|masked_fill|compare|clamp)
""")
