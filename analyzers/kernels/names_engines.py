"""Kernels that serving engines bring along: vLLM, SGLang, FlashInfer, TensorRT-LLM, triton_kernels, linear attention.

"vLLM source" is csrc/ and the Triton kernels of vLLM 0.32; the others by their public sources. A Triton kernel that
multiplies tiles (`tl.dot`) is counted as one that uses tensor cores: it does so for the 16-bit and narrower types that
engines run in.
"""

from __future__ import annotations

from phaseprof.analyzers.kernels.kernel_table import table

#: Mixture of experts, before anything that would claim its products or its quantization.
MOE = table(r"""
moe  yes  vllm-b200 (TensorRT-LLM grouped products)
    ^bmm_\w*(swiGlu|dynBatch|routeAct)
moe  yes  vLLM source
    ^_?(fused_moe_kernel|fused_moe_\w+|moe_mmk|batched_triton_kernel|expert_triton_kernel)
moe  yes  vllm-mi300x (triton_kernels, MXFP4 experts)
    ^_(matmul_ogs|p_matmul_ogs|matmul|p_matmul)_
moe  yes  vLLM, DeepGEMM, TensorRT-LLM source
    marlin_moe|MarlinMoE|moe_wna16|MoeFCGemm|moe_gemm|grouped_?gemm(?!a)|group_?gemm(?!a)|_mxfp8_grouped_gemm|
    m_grouped|fused_moe_nvfp4
moe  yes  CUTLASS grouped products (vLLM, TensorRT-LLM)
    ~cutlass::.*(GroupProblemShape|GroupedProblem|MoeFCGemm|PtrArray|GemmMoeProblem)
moe  yes  DeepGEMM source
    ~deep_gemm::.*(Grouped|GemmType\)?[12])
moe  no  vllm-b200 (TensorRT-LLM routing and finalize, by FlashInfer)
    moe::dev::|^moe::
moe  no  vLLM, SGLang source
    topk_?[Gg]ating|grouped_?[Tt]opk|[Mm]oe_?([Tt]op|softmax|sum|align|permute|unpermute|sort|fused_gate|lora_align|
    routing|prepare|reduce)|fused_?topk|biased_topk|hash_topk
moe  no  vLLM, TensorRT-LLM source
    [Ee]xpert_?(offset|count|num|ids|first|map)|count_and_sort_expert|[Ee]xpandInputRows|[Ff]inalizeMoe|
    finalizeKernel|[Rr]outing(Indices|Renormalize|DeepSeek|Custom|Llama|Top)|expandInputRowsKernel
moe  no  vllm-mi300x (triton_kernels)
    _finalize_matmul|_combined_routing|_sum_bitmatrix|_topk_forward|_routing_|_expt_data|pack_bitmatrix|_keyed_add|
    _reduce_grouped|_bitmatrix|_matmul_metadata|_ragged_tensor
moe  no  SGLang, vLLM source
    shuffle_?[Rr]ows|ep_(scatter|gather|moe)|_fwd_kernel_ep_|(pre|post)_reorder|(silu_and_mul_masked|
    compute_)\w*(seg_indptr|src2dst|masked_m)|deepep_|_swiglu_limit_pad_aware|apply_expert_map
moe  no  vLLM source
    (get|compute)_\w*(problem_sizes|moe_mm|expert)|blockscale_experts|expert_quant|write_zeros_to_output|
    compute_identity_kernel|_masked_topk_sum
""")

ATTENTION = table(r"""
attention  no  vLLM, FlashInfer source
    merge_attn_states|MergeState|VariableLengthMerge|VariableLengthAttentionSum|merge_state|AttentionReduce
attention  no  vllm-mi300x
    ^reduce_segments|kernel_reduce_segments|paged_attention_v\d_reduce|paged_attention_\w*reduce|(decode|
    split_?kv)\w*_reduce|_fwd_kernel_stage2|_merge_\w*(splitk|topk_attn|mla)|_segmented_attention_reduce
attention  yes  FlashInfer source
    BatchPrefill|SinglePrefill|BatchMLA|PODWith|PersistentAttention|PersistentKernelTemplate|PrefillWithKVCache|
    BlockSparse\w*Attention
    ~flashinfer::.*(Prefill|CollectiveMainloop|BatchMLA|Sm100Fmha|FmhaKernel)
attention  no  FlashInfer source (without tensor cores; with them it takes the prefill kernel)
    BatchDecode|SingleDecode|BatchDecodeWithPagedKVCacheKernelMLA
attention  yes  vllm-b200 (TensorRT-LLM, by FlashInfer)
    ^fmhaSm|^fmha_v2|kernel_mh[am]|xqa|mla_?xqa|fmhaKernel|fmha_sm\d+|cutlass_mla|Sm100FmhaMla
attention  yes  CUTLASS, vLLM source
    ~cutlass::fmha|Sm100Fmha|Sm100Mla|fmha::kernel
attention  no  TensorRT-LLM, vLLM source
    masked_multihead_attention|mmha_|paged_attention_v[12]_kernel|paged_attention_kernel
attention  yes  vllm-mi300x
    kernel_\w*unified_attention|_tq_decode_stage|kernel_paged_attention_2d|_fwd_grouped_kernel_stage1|
    context_attention|_attn_fwd|attention_fwd|flash_attention|_prefix_prefill
attention  no  vLLM source (one head a block, no tl.dot)
    ^_fwd_kernel_stage1
attention  yes  vLLM, SGLang source
    ^_fwd_kernel(_alibi|_aligned|_flash_attn_v2|_unified|_destindex)?$|^_decode_(grouped_)?att|^_extend_attention
attention  yes  vLLM source, DeepGEMM source
    sparse_attn|_gqa_sparse|_sparse_mla|sparse_mla|mqa_logits|_mla_sparse|_qsa_(mqa|sparse)|_split_kv_stage1|
    _inkling_rel_attention|sparse_prefill|lightning_indexer|_segmented_attention_stage
attention  yes  DeepGEMM source
    ~deep_gemm::.*mqa_logits
attention  no  vLLM, FlashMLA source
    concat_mla|mla_combine|get_mla_metadata|FlashMLA\w*Metadata|prepare_varlen_num_blocks|tile_scheduler|
    vertical_slash|_block_scores_kernel|_index_block_score|_decode_index_score
""")

ELEMENT = table(r"""
kv_write  no  vllm-b200, sglang-mi300x
    reshape_and_cache|_reshape_cache|concat_and_cache|store_kv_?cache|store_kvcache|StoreKV|set_kv_buffer|
    set_mla_kv|_write_kv
kv_write  no  FlashInfer, TensorRT-LLM source
    AppendPagedKVCache|applyBiasRopeUpdateKVCache|invokeUpdateKV|updateKVCache|UpdateKVCacheKernel|decodeAppendKV
kv_write  no  vLLM, SGLang source
    copy_blocks|swap_blocks|_zero_kv_blocks|kv_cache_(scatter|gather)|gather_(and_maybe_dequant_)?cache|
    cp_gather_(cache|and_upconvert|indexer)|gather_cache|transfer_kv|_copy_kv|copy_all_layer_kv
kv_write  no  vLLM source (fused with norm, rope or quantization)
    indexer_k_(quant_and_cache|norm_rope)|(quant|insert|store|write)\w*_(k|kv|cache|cache_kernel)$|
    quantize_and_insert_k|_insert_(index_)?cache|_rope_\w*insert|_kv_\w*insert|_store_quantized|_tq_fused_store|
    _ultraquant_store|fused_\w*kv\w*insert|_compress_norm_rope|_norm_rope_quant_store
norm  no  vllm-b200, sglang-mi300x
    (?i)(rms|layer|l2|group|gemma_rms|qk)_?norm|GeneralLayerNorm|FusedAddRMSNorm|_rmsnorm|rmsnorm|l2norm|(qk|
    dual)_?rms|_layer_norm_fwd|mhc_pre_big_fuse|_norm_row
rope  no  vllm-b200, sglang-mi300x
    (?i)rotary|_?rope_|rope_kernel|ApplyRope|rope_quantize|mrope|BatchQKApplyRotary
quantization  no  vLLM, SGLang source
    (?i)(silu|gelu|swiglu|act)\w*quant
activation  no  vllm-b200, sglang-mi300x
    (?i)act_and_mul|silu_and_mul|gelu_and_mul|swiglu|(silu|gelu|relu)_?(mul|kernel|squared|tanh|quick|new|fast)|
    activation_kernel|doGatedActivation|doActivation|gatedActivation|fatrelu|situ_and_mul
gemm  yes  vLLM, SGLang, TensorRT-LLM source
    (?i)marlin::|^marlin|machete|gptq_marlin|awq_gemm|gemm_forward_4bit|fpA_intB|fused_a_gemm|router_gemm|scaled_mm|
    w[48]a(8|16)|_block_scaled_mm|triton_w4a16|mxfp8_linear|int4_gemm|qserve
gemm  yes  vLLM source
    ~(machete|marlin|Marlin)
gemm  no  vLLM, TensorRT-LLM, llama.cpp source
    gemm_half_q|exllama|reconstruct_(exllama|gptq)|(batched_)?gemv|weight_only_(batched_)?gemv|
    weightOnlyBatchedGemv|cudaCoreGemm|mul_mat_vec|dequantize_mul_mat|LLGemm|kgemm
gemm  yes  vllm-b200; vLLM, SGLang source (LoRA included)
    ^bmm_|^gemm_\w*(sm1\d\d|tma)|mul_mat_q|^matmul_kernel|^_?matmul_persistent|(bmm|mm)_kernel(_persistent)?$|
    _block32_(tiled|packed)|_lora_(shrink|expand)_kernel|(sgmv|bgmv)|_sgemm_lora|_qkv_lora|_gate_up_lora
quantization  no  vllm-b200
    (?i)quant|per_token_cast|cvt_fp(8|16)|fp8_cast|scale_swizzle|block_scale_interleave|convert_fp8|mxfp|
    _downcast_to_mxfp|repack|dequantize|awq_dequant|hadamard|permute_cols
scan  yes  vLLM source (flash-linear-attention, Mamba-2)
    chunk_\w*(fwd|scan|state|kernel_o)|_chunk_(scan|state|cumsum)|_bmm_chunk|chunk_gated_delta|chunk_scaled_dot_kkt|
    chunk_fwd|recompute_w_u|solve_tril|merge_16x16|gdn_\w*prefill|kda_fwd|chunk_kda|_fwd_(diag|kv_parallel|
    none_diag)
scan  no  vLLM source
    selective_scan|selective_state|_selective|ssm_|mamba|causal_conv1d|_causal_conv|short_conv|_sconv|state_passing|
    fused_recurrent|gated_delta|delta_rule|gdn|kda_|_kda|linear_attn|lightning_attention|chunk_local_cumsum|
    _fwd_kv_reduce|recoverssm|replayssm|rwkv|wkv\d
sampling  no  vLLM, SGLang, FlashInfer, TensorRT-LLM source
    (?i)sampling|sample_|gumbel|rejection|TopPRenorm|TopKRenorm|TopKMask|RadixTopK|MinP|air_top|top_?p_|topk_?topp|
    _topp_|penalt|apply_repetition|logits?_?(bias|process|bitmask)|token_bitmask|grammar_bitmask|_temperature|
    _min_p_|_bad_words|_bincount|greedy_argmax|argmax|logprob|_log_softmax|_ranks_kernel|ban_repeat|beam_?(search|
    hypo|stage)|AddGumbel|curand|persistent_topk|eagle_(step|prepare)|^expand_kernel|_expand_idx|copy_and_expand|
    thinking_budget|^_bias_kernel|max_(and_)?sumexp|residual_mass|cumulative_log_p|_num_nans|_row_stats|verify_tree|
    build_tree|ChainSpeculative|TreeSpeculative|_ngram_|draft
embedding  no  vLLM, TensorRT-LLM source
    (?i)embed|vocab_parallel
collective  no  words of collectives
    ~moe_?(all_?to_?all|dispatch|combine)|all_?(reduce|gather|to_?all)|reduce_?scatter
indexing  no  vllm-b200, sglang-mi300x (bookkeeping of a step)
    compute_slot_mapping|_prepare_|prepare_inputs|block_table|page_indices|kv_indices|compute_position|
    resolve_future_token|_post_update|_gather_|advance_step|create_\w*_indices|get_last_loc|write_req_to_token|
    _token_request|index_map|_copy_page|_combine_sampled|seq_lens|_topk_indices|_apply_write|metadata|_scatter_num|
    _fill_num|state_indices|req_to_token|write_\w*indices|positions?_kernel
elementwise  no  vLLM source (hyper-connections and gates between layers)
    mhc_|_i?hc_|attn_res|_ple_gate|_gate_select
copy  no  vLLM, TensorRT-LLM source
    (?i)(batch_)?memcpy|transpose|^copy_|_copy_kernel|concat|_pad_|padding|memset|swizzle|unpack|_pack|
    convert_layout|shift_input
""")
