"""Operators as torch.profiler names them on a CPU, where they stand in the place of kernels.

Only outermost operators are in a trace: `aten::linear`, not the `aten::addmm` that it calls. In-place forms and
overloads (`add_`) follow their plain form. Tensor cores are no matter of a CPU. "torch's list": the operators that
torch 2.13 registers; "vLLM": the schemas of vLLM 0.32's extension for CPUs.
"""

from __future__ import annotations

from phaseprof.analyzers.kernels.kernel_table import table

OPERATORS = table(r"""
attention  no  torch's list; transformers on a CPU
    ^aten::_?(flex_|scaled_dot_product_|efficient_attention|flash_attention|cudnn_attention|fused_sdp|
    native_multi_head|transform_bias_rescale_qkv)
attention  no  vLLM
    ::(cpu_attention_with_kv_cache|decode_attention_cpu|extend_attention_cpu|mla_decode_kvcache|
    flash_mla_with_kvcache_cpu|fp8_paged_mqa_logits_cpu|unified_(mla_)?attention(_with_output)?|merge_attn_states|
    sage_attention)
moe  no  vLLM
    ::(cpu_fused_moe|fused_experts|dynamic_4bit_int_moe|moe_forward|fused_moe|_?topk_(softmax|sigmoid)|grouped_topk|
    biased_(grouped_)?topk|hash_topk|moe_\w+|invoke_fused_moe)
moe  no  torch's list; transformers' experts
    ^aten::_?grouped_mm|^aten::_scaled_grouped_mm
    ^transformers::grouped_mm|histc$
collective  no  torch's list; vLLM; odd-no-rank
    ^c10d|^_c10d_functional|^symm_mem::
    record_param_comms|^gloo:|^nccl:|^mpi:
    ::(shm_(allreduce|all_gather|gather|send|recv)|\w*all_?reduce|\w*all_gather|\w*reduce_scatter)
    ^All2All
kv_write  no  vLLM
    ::(reshape_and_cache\w*|cpu_attn_reshape_and_cache|concat_and_cache_mla\w*|\w*unified_(mla_)?kv_cache_update|
    \w*(kv_rope|kv_cache|cache_fp8|cache_bf16|ds_mla)\w*insert|copy_blocks|swap_blocks|\w+_kv_insert\w*|
    compress_norm_rope_store\w*|save_partial_states_cpu)
rope  no  vLLM
    ::\w*(rotary|rope)\w*$
norm  no  torch's list; vLLM
    ^aten::(native_)?(layer_norm|group_norm|batch_norm|instance_norm)
    ^aten::_?(fused_)?rms_norm
    ^aten::(_?batch_norm|local_response|normalize|_weight_norm|miopen_batch|cudnn_batch|mkldnn_batch|renorm)
    ::\w*(rms_norm|layer_norm|layernorm|rmsnorm|batch_norm|group_norm|instance_norm)\w*
gemm  no  vLLM
    ::(onednn_(scaled_)?mm|weight_packed_linear|\w*scaled_mm\w*|cpu_gemm_wna16|bmm_cpu|\w*gemm(?!a)\w*|
    wrapped_\w*linear\w*|_wrapped_quantized_linear\w*|sm100\w*mm|machete_mm|inverse_gptj_rope_o_proj_cpu|
    lora_(shrink|expand))
quantization  no  torch's list; torchao, optimum-quanto, bitsandbytes
    ^aten::(quantize_per|dequantize|fake_quantize|_?choose_qparams|q_(scale|zero)|int_repr|_make_per)
    ::(\w*quantize(?!d)\w*|\w*quant|\w*quant_\w*)$
    ^quanto::unpack|::convert_(weight|scale)
    prepack(?!ed)|repack$|^quantization::
    _packed_weight$|choose_qparams|pack_gemm
gemm  no  torch's list
    ^aten::(linear|matmul|mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|vdot)_?(out)?$
    ^aten::(inner|einsum|addr|ger|outer|chain_matmul|tensordot)_?(out)?$
    ^aten::(_addmm_activation|linalg_(matmul|multi_dot|vecdot)|kron)_?(out)?$
    ^aten::(bilinear|_trilinear|_linear\w*|mkldnn_linear\w*|_?cslt\w*)_?(out)?$
    ^aten::(_int_mm|_scaled_mm\w*|_weight_int\dpack_mm\w*)_?(out)?$
    ^aten::(_dyn_quant_matmul\w*|_mixed_dtypes_linear)_?(out)?$
    ^aten::(_wrapped_\w*linear\w*|fbgemm_linear\w*)_?(out)?$
    ^aten::(_sparse_\w*(mm|linear)\w*|sspaddmm|_foreach_mm|smm|hspmm)_?(out)?$
    ^aten::(_fused_rms\w*linear)_?(out)?$
gemm  no  torch's list; torchao, optimum-quanto, bitsandbytes
    ^(mkldnn|mkl|onednn|quantized|_quantized|sparse|inductor|torchao|quanto|gptqmodel|bitsandbytes|ipex|zentorch|
    torch_ipex|tpp|_native)::\w*(linear|gemm|mm|matmul|gemv)
activation  no  torch's list; vLLM
    ^aten::_?(silu|gelu|relu6?)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(leaky_relu|elu|selu)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(celu|mish|hardswish)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(hardsigmoid|hardtanh)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(glu|sigmoid|tanh)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(softplus|threshold)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(prelu|rrelu|log_sigmoid)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(logsigmoid|hardshrink)(_backward\w*|_forward|_with_noise)?_?$
    ^aten::_?(softshrink)(_backward\w*|_forward|_with_noise)?_?$
    ::(silu_and_mul|gelu_\w+|mul_and_silu|relu_squared|swigluoai\w*|fatrelu\w*|situ\w*|silu\w*|activation_lut\w*|
    relu|sigmoid|tanh|hardswish|elu|leaky_relu|celu|relu6|threshold)$
embedding  no  torch's list; odd-no-rank
    ^aten::_?embedding|^aten::(_embedding_bag|embedding_renorm)
    embedding|bounds_check_indices|permute_pooled_embs
scan  no  vLLM; torch's list
    ::(mamba\w*|selective_\w+|causal_conv1d\w*|chunk_gated_delta_rule\w*|fused_sigmoid_gating_delta\w*|fused_gdn\w*|
    cpu_gdn\w*|\w*gdn_attention\w*|short_conv|linear_attention|lstm\w*|gru\w*|rnn\w*|quantized_(lstm|gru|rnn)\w*)
    ^aten::(lstm|gru|rnn|_thnn_fused_(lstm|gru)|quantized_(lstm|gru|rnn)|mkldnn_rnn)
convolution  no  torch's list
    ^aten::_?(slow_|thnn_|mkldnn_|cudnn_|miopen_|xnnpack\w*)?\w*conv(olution|_tbc|_depthwise|_transpose)?\w*$
    pool
    ^aten::(im2col|col2im|upsample|interpolate|grid_sampler|pixel_(un)?shuffle|_upsample|fft|stft|istft|_fft)
    ::\w*conv[123]d|_convolution|^mkldnn_prepacked
sampling  no  torch's list; vLLM
    ^aten::(arg(max|min)|multinomial|bernoulli|exponential|uniform|normal|random|rand|geometric|cauchy|log_normal|
    poisson|binomial|dropout|native_dropout|_?sample_dirichlet|standard_gamma|gumbel|_fused_dropout)\w*
    ::(greedy_argmax|fused_gumbel_argmax|\w*rejection_\w+|sample_recovered\w*|apply_repetition_penalties\w*|
    expand_kernel_impl|eagle_\w+|copy_and_expand_\w+|topk_transform\w*|philox\w*)
sort  no  torch's list
    ^aten::(sort|argsort|topk|kthvalue|msort|median|nanmedian|mode|quantile|unique|_unique|unique_\w+|aminmax_sort|
    isin|searchsorted|bucketize|top_k\w*)
copy  no  torch's list
    ^aten::(to|_to_copy|_to_cpu|copy|copy_|_copy_from\w*|clone|contiguous|cat|concat|concatenate|stack|hstack|
    vstack|dstack|column_stack|row_stack|block_diag|item|_local_scalar_dense|repeat|tile|repeat_interleave|pad|
    _pad\w*|constant_pad_nd|reflection_pad\w*|replication_pad\w*|roll|flip|fliplr|flipud|rot90|fill|fill_|zero|
    zero_|zeros\w*|ones\w*|full\w*|eye|tril\w*|triu\w*|arange|linspace|logspace|range|scalar_tensor|type_as|float|
    half|double|long|int|bool|bfloat16|cpu|cuda|pin_memory|_pin_memory|_to_dense|to_dense|to_sparse\w*|_cat|_stack|
    new_(zeros|ones|full|tensor)|empty_fill|set_data|cartesian_prod|combinations|meshgrid|tensor|masked_fill_copy|
    \w+_copy|_efficientzerotensor|complex|polar|_reshape_copy|_conj_physical|resolve_(conj|neg)|_unsafe_masked|
    copysign|atleast_\w+|lift|lift_fresh|lift_fresh_copy|_assert\w*|nested_tensor\w*|_nested_\w*|_foreach_copy|
    channel_shuffle|asarray|from_file|cosine_embedding|deg2rad_copy)_?$
indexing  no  torch's list; vLLM; odd-no-rank
    ^aten::_?(unsafe_)?(index|gather|scatter|take)\w*$
    ^aten::_?(unsafe_)?(put|where|nonzero)\w*$
    ^aten::_?(unsafe_)?(masked_(fill|select|scatter))\w*$
    ^aten::_?(unsafe_)?(select_scatter|slice_scatter)\w*$
    ^aten::_?(unsafe_)?(diagonal_scatter)\w*$
    ^aten::_?(unsafe_)?(as_strided_scatter|index_\w+)\w*$
    ^aten::_?(unsafe_)?(scatter_\w+|take_along_dim)\w*$
    ^aten::_?(unsafe_)?(argwhere|segment_reduce)\w*$
    ^aten::_?(unsafe_)?(one_hot|bincount)\w*$
    ^aten::_?(unsafe_)?(tril_indices|triu_indices)\w*$
    ^aten::_?(unsafe_)?(flatnonzero|nonzero_\w+)\w*$
    ^aten::_?(unsafe_)?(_index_\w+|unsafe_index\w*)\w*$
    ^aten::_?(unsafe_)?(_unsafe_index\w*)\w*$
    ^aten::_?(unsafe_)?(_unsafe_masked_index\w*)\w*$
    ^aten::_?(unsafe_)?(fill_diagonal|diag_embed)\w*$
    ^aten::_?(unsafe_)?(where_self)\w*$
    ::compute_slot_mapping\w*
    ::permute_(1|2)?D?_?\w*sparse
    ::(offsets_range|to_dense_representation|asynchronous_\w*cumsum)
    ^fb(gemm)?::
reduction  no  torch's list
    ^aten::_?(log_)?softmax
    ^aten::_?(log_softmax|safe_softmax|sparse_softmax|softmax_backward\w*|masked_softmax|sum|nansum|mean|nanmean|
    prod|max|min|amax|amin|aminmax|all|any|std|var|std_mean|var_mean|norm|linalg_(vector_)?norm|logsumexp|
    logcumsumexp|cumsum|cumprod|cummax|cummin|count_nonzero|histc|histogram\w*|trace|dist|cdist|pdist|
    cosine_similarity|pairwise_distance|_cummax_helper|_cdist_forward|_euclidean_dist|sum_to_size|native_norm|
    frobenius_norm|nuclear_norm|equal|is_nonzero|allclose|trapezoid|diff|\w+_loss\w*|cross_entropy\w*|nll_\w+|
    kl_div|binary_cross\w*|ctc_loss|huber_loss|_foreach_norm|isclose)_?$
view  no  torch's list; odd-no-rank, odd-cpu-only
    ^aten::(view\w*|reshape\w*|_reshape_alias\w*|_unsafe_view|transpose\w*|permute|t|t_|T|mT|mH|H|numpy_T|matrix_H|
    adjoint|swapaxes|swapdims|movedim|moveaxis|expand\w*|squeeze\w*|unsqueeze\w*|select|slice|narrow\w*|split\w*|
    tensor_split|hsplit|vsplit|dsplit|chunk|unsafe_(chunk|split\w*)|unbind|unfold\w*|flatten|unflatten|ravel|
    as_strided\w*|diagonal|diag|broadcast_\w+|alias|detach\w*|real|imag|conj|_conj|_neg_view|view_as_\w+|empty\w*|
    new_empty\w*|resize\w*|set_|size|stride|numel|dim|is_\w+|_is_\w+|record_stream|result_type|can_cast|
    promote_types|_has_\w+|requires_grad_?|retain_grad|output_nr|_version|data|_values|values|indices|_indices|
    crow_indices|col_indices|align_\w+|rename\w*|refine_names|names|storage_offset|sym_\w+|_shape_as_tensor|
    _backward|_fw_primal|_make_dual|_unpack_dual|_lazy_clone|_to_functional|_sync|_enable\w*|_dim\w+|_nnz|
    sparse_dim|dense_dim|_coalesced\w*|coalesce|infer_size|_infer\w*|__\w+__|len|_dimV|_dimI|sizes|_use_\w+|
    _fused_sdp_choice|expand_as|movedim_|ravel_|get_device|element_size|item_|nelement|_nested_get\w*)$
    ^(detach_?|torch::autograd::|autograd::)
    ^aten::_?(nnpack|cufft|debug|test)\w*
    ^profiler::|weak_ref_tensor
    get_scheduler_metadata|create_onednn
    release_dnnl|init_cpu|init_shm|join_shm
    cpu_attn_get|cpu_has|is_onednn
elementwise  no  torch's list
    ^aten::_?(foreach_)?(add|sub|subtract|mul|multiply|div)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(divide|true_divide|floor_divide|neg)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(negative|positive|abs|absolute|pow)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(float_power|square|sqrt|rsqrt)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(reciprocal|exp|exp2|expm1|log|log2)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(log10|log1p|sin|cos|tan|asin|acos)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(atan|atan2|sinh|cosh|asinh|acosh)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(atanh|arc\w+|erf|erfc|erfinv|sign)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(signbit|sgn|ceil|floor|round|trunc)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(fix|frac|clamp|clamp_min|clamp_max)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(clip|maximum|minimum|fmax|fmin|lerp)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(addcmul|addcdiv|rsub|remainder|fmod)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(eq|ne|lt|le|gt|ge|not_equal|less\w*)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(greater\w*|logical_\w+|bitwise_\w+)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(__\w+__|isnan|isinf|isfinite)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(isneginf|isposinf|isreal|nan_to_num)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(xlogy|logaddexp2?|hypot|heaviside)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(ldexp|frexp|gcd|lcm|sinc|softsign)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(digamma|lgamma|polygamma|mvlgamma|i0)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(special_\w+|deg2rad|rad2deg|logit)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(angle|nextafter|cross|linalg_cross)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(cumulative\w*|igammac?|rad\w+)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(masked_scale|_amp_\w+)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(_fused_(adam|adamw|sgd|adagrad))(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(_make_dep_token|hann_window)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(hamming_window|bartlett_window)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(blackman_window|kaiser_window)(_tensor|_scalar)?_?$
    ^aten::_?(foreach_)?(sigmoid_add|bias_add)(_tensor|_scalar)?_?$
    ^quantized::(add|mul|cat|clamp|dropout|max_pool|softmax)|^onednn::q(add|mul)
    ^_quantized::add|^prims?::|^inductor::|^rngprims::
gemm  no  torch's list (linear algebra)
    ^aten::_?(linalg_\w+|cholesky\w*|svd\w*|qr|lu\w*|triangular_solve|inverse|det|logdet|slogdet|matrix_\w+|
    solve\w*|eig\w*|pinverse|ormqr|orgqr|geqrf|lstsq|addmm_\w+|mkldnn_\w*linear\w*)
elementwise  no  torch.compile on a CPU (inductor)
    ^(graph_\d+_)?cpp_fused|^CompiledFxGraph|^Torch-Compiled
    ^## Call Compiled
""")
