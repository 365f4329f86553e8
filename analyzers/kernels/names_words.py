"""The last resort: words that developers put into kernels' names, in the order in which they are believed.

What matches here has no line in the other tables. A name without any of these words stays `other`.
"""

from __future__ import annotations

from phaseprof.analyzers.kernels.kernel_table import table

WORDS = table(r"""
collective  no  a word
    (?i)all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|nccl|rccl|nvshmem|sendrecv
moe  unknown  a word
    (?i)moe|expert
attention  unknown  a word
    (?i)attn|attention|fmha|mha|(?<![a-z])mla|sdpa|mqa
kv_write  no  a word
    (?i)kv_?cache|cache_kernel|kvstore
norm  no  a word
    (?i)rms_?norm|layer_?norm|norm(_|alize|$)|normkernel|l2norm
rope  no  a word
    (?i)rotary|(?<![a-z])rope
scan  unknown  a word
    (?i)mamba|(?<![a-z])ssm|ssd_|delta_rule|linear_?attn|rwkv|retention|causal_conv
quantization  no  a word
    (?i)quant|fp8_cast|nf4
activation  no  a word
    (?i)silu|gelu|swiglu|geglu|glu_|relu|swish
gemm  unknown  a word
    (?i)(?<!fb)gemm(?!a)|gemv|matmul|(?<![a-z])mm_|_mm(_|$)|bmm|linear_kernel|lora|wgmma
    (?i)qdot
convolution  unknown  a word
    (?i)conv\d?d?|pooling
embedding  no  odd-launchless-kernels
    (?i)embed(?!ded)|bounds_check_indices
sampling  no  a word
    (?i)sampl|argmax|multinomial|logit|top_?p(?![a-z])|penalt
sort  no  a word
    (?i)sort|top_?k|bitonic
indexing  no  odd-launchless-kernels
    (?i)index|indices|gather|scatter|permute_(1|2)D|bucketize
    (?i)offsets?_?(range|kernel)|slot|lookup|linearize
copy  no  a word
    (?i)copy|memset|memcpy|transpose|concat|(?<![a-z])cat_|fill|permute|zero
reduction  no  a word
    (?i)softmax|reduce|reduction|cumsum|(?<![a-z])sum(?![a-z])|mean|scan
elementwise  no  a word
    (?i)elementwise|pointwise|element_?wise|vectorized|multi_tensor|adam|optimizer
    (?i)dropout|loss|bias_add|(?<![a-z])(add|mul|scale|cast|mask)(_|$)
""")
