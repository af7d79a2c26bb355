# The groups that every policy knows, written in the language itself.
#
# A word such as `matmul` stands for what its line here says. The prelude is always loaded; a policy that defines one
# of these names for itself gets its own meaning, and a warning. An operator whose name is also a group's is reached with
# its namespace: `aten.view`, `aten.norm`.
#
# Globs stand where torch adds variants from release to release, so that a new one is covered the day it appears.

# --- the work -----------------------------------------------------------------------------------------------------

# Products of matrices, grouped and scaled ones (MoE experts, float8 linears) included; `matmul`, `linear` and `einsum`
# are seen where a tracer has not taken them apart, and Transformers' stand-in for the grouped one where a compiler would
# not take that: the experts of one model are a product on every path.
let matmul = (
    aten.{mm,addmm,bmm,baddbmm,addbmm,matmul,linear,einsum,dot,vdot,mv,addmv},
    aten.{_scaled_mm,_scaled_mm_v2,_scaled_grouped_mm,_scaled_grouped_mm_v2,_int_mm},
    {aten,transformers}.{_grouped_mm,grouped_mm_fallback}
)

# Every form of scaled-dot-product attention, whichever kernel a machine chooses, and flex and varlen attention. A
# list without the cuDNN form once recomputed attention on the newest machines without a word.
let attention = (
    aten.*scaled_dot_product*attention*, aten._triton_scaled_dot_attention,
    aten._{flash,efficient,cudnn}_attention_forward, higher_order.flex_attention, torch_attn._varlen_attn
) except aten.*_backward

# PyTorch's own list of compute-intensive operators: what its min-cut partitioner would rather not run twice.
let compute = (
    aten.{mm,addmm,bmm,_scaled_mm,convolution,convolution_backward,upsample_bilinear2d},
    aten.{_efficient_attention_forward,_flash_attention_forward},
    aten.{_scaled_dot_product_efficient_attention,_scaled_dot_product_flash_attention},
    higher_order.flex_attention
)

# --- communication -------------------------------------------------------------------------------------------------

# The functional collectives, the coalesced and in-place forms with them.
let all_gather = *c10d_functional*.all_gather_into_tensor*
let allgather = all_gather
let reduce_scatter = *c10d_functional*.reduce_scatter_tensor*
let all_reduce = *c10d_functional*.all_reduce*
let all_to_all = *c10d_functional*.all_to_all_single*, _dtensor.shard_dim_alltoall
let collective = all_gather, reduce_scatter, all_reduce, all_to_all, *c10d_functional*.{broadcast,broadcast_}

# Where the result of a collective is waited for. It shares the decision of its collective.
let wait = *c10d_functional*.wait_tensor

# --- the cheap rest ------------------------------------------------------------------------------------------------

# A change of dtype or device.
let cast = prims.convert_element_type, aten.{_to_copy,to,type_as}, prims.device_put

# Results that are only another look at memory that is there already.
let view = (
    aten.{view,_unsafe_view,reshape,_reshape_alias,view_as,view_as_real,view_as_complex,as_strided,alias,detach},
    aten.{expand,expand_as,broadcast_to,permute,transpose,t,mT,mH,adjoint,movedim,swapaxes,squeeze,unsqueeze},
    aten.{flatten,unflatten,ravel,select,slice,narrow,diagonal,unfold,split,split_with_sizes,chunk},
    aten.{tensor_split,hsplit,vsplit,dsplit,unbind,real,imag,_conj,_neg_view},
    prims.{broadcast_in_dim,collapse_view,split_dim,squeeze,transpose,view_of,view_of_dtype}
)

# Draws random numbers, in place too. Attention draws as well, but only with dropout: `where is random` knows, a name
# cannot.
let random = (
    aten.{native_dropout,dropout,alpha_dropout,feature_dropout,feature_alpha_dropout,_fused_dropout},
    aten.{bernoulli,binomial,poisson,multinomial,normal,normal_functional,uniform,exponential,geometric},
    aten.{cauchy,log_normal,random,rand,rand_like,randn,randn_like,randint,randint_like,randperm},
    aten.{rrelu,rrelu_with_noise_functional,_standard_gamma,_sample_dirichlet},
    aten.{bernoulli_,cauchy_,exponential_,geometric_,log_normal_,normal_,random_,uniform_},
    prims.{normal,uniform,inductor_seed,inductor_seeds,inductor_random}, rngprims.philox_rand
)

# One result element from one element of each input: cheap to run again, and fused where it stands.
let pointwise = (
    aten.{add,sub,rsub,mul,div,true_divide,neg,abs,pow,sqrt,rsqrt,reciprocal,square,exp,exp2,expm1},
    aten.{log,log2,log10,log1p,sin,cos,tan,asin,acos,atan,atan2,sinh,cosh,tanh,erf,erfc,erfinv},
    aten.{relu,relu6,gelu,silu,sigmoid,leaky_relu,elu,celu,selu,mish,softplus,hardtanh,hardsigmoid},
    aten.{hardswish,hardshrink,softshrink,threshold,logit,xlogy,sgn,sign,signbit},
    aten.{clamp,clamp_min,clamp_max,clip,maximum,minimum,fmax,fmin,floor,ceil,round,trunc,frac},
    aten.{fmod,remainder,lerp,addcmul,addcdiv,where,masked_fill,nan_to_num,copysign,hypot},
    aten.{eq,ne,lt,le,gt,ge,isnan,isinf,isfinite,logical_and,logical_or,logical_not,logical_xor},
    aten.{bitwise_and,bitwise_or,bitwise_xor,bitwise_not,clone}, prims.{convert_element_type,fma}
)

# The results of activation functions, as whole operators and where a compiler has taken them apart: x / (1 + exp(-x))
# is a silu, x * (1 + erf(…)) a gelu. A cast back to the model's type is part of such a form. Not among them: functions
# that take random numbers (rrelu), and those that a clamp or a comparison alone could be (relu6, threshold).
let activation = (
    aten.{relu,relu_,gelu,gelu_,silu,silu_,sigmoid,sigmoid_,leaky_relu,leaky_relu_,elu,elu_,celu,celu_,selu,selu_},
    aten.{mish,mish_,softplus,hardsigmoid,hardsigmoid_,hardswish,hardswish_,glu,prelu,_prelu_kernel},
    (aten.{tanh,tanh_} except (tanh feeding (add feeding mul)) except (tanh fed by (aten.where fed by log1p))),
    last (
        (
            (div fed by (add fed by (exp fed by neg))),
            (mul fed by (add fed by (erf, tanh))),
            (mul fed by (tanh fed by (aten.where fed by log1p))),
            (div fed by (mul fed by (clamp_max fed by (clamp_min fed by add)))),
            (div fed by (clamp_max fed by (clamp_min fed by add))),
            ((aten.where fed by aten.gt.Scalar) and (aten.where fed by (mul, expm1))),
            (aten.where fed by log1p) except (aten.where feeding tanh)
        ),
        (prims.convert_element_type fed by (
                (div fed by (add fed by (exp fed by neg))),
                (mul fed by (add fed by (erf, tanh))),
                (mul fed by (tanh fed by (aten.where fed by log1p))),
                (div fed by (mul fed by (clamp_max fed by (clamp_min fed by add)))),
                (div fed by (clamp_max fed by (clamp_min fed by add))),
                ((aten.where fed by aten.gt.Scalar) and (aten.where fed by (mul, expm1))),
                (aten.where fed by log1p) except (aten.where feeding tanh)
        ))
    ) per chain
)

# Fewer elements out than in.
let reduction = (
    aten.{sum,mean,prod,amax,amin,aminmax,argmax,argmin,all,any,var,std,var_mean,std_mean},
    aten.{logsumexp,nansum,count_nonzero,linalg_vector_norm}, aten.max.dim, aten.min.dim,
    prims.{sum,prod,amax,amin,var}
)

# Normalisation layers; where a compiler has taken them apart, look for their reductions.
let norm = (
    aten.{layer_norm,native_layer_norm,rms_norm,_fused_rms_norm,group_norm,native_group_norm,instance_norm},
    aten.{batch_norm,native_batch_norm,cudnn_batch_norm,miopen_batch_norm}, aten._native_batch_norm_legit*,
    aten.{_batch_norm_with_update,_batch_norm_with_update_functional,_batch_norm_no_update}
)
