"""Common names of operations and the operators they are traced as; selectors that seldom match what was meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.globs import is_magic
from policylang.language.operators import group_names, selector_of_groups
from policylang.language.shown import joined
from policylang.language.syntax import Bucket, Intersection, Operator, Rule, Scheduling, Selector
from policylang.language.walk import parts, walk

_SIGMOID_PRODUCT = "div fed by (add fed by (exp fed by neg))"
_SILU = ("silu", _SIGMOID_PRODUCT, "mul fed by sigmoid")
_GELU = ("gelu", "mul fed by (add fed by erf)", "mul fed by (add fed by tanh)")
_MEAN_NORM = ("add fed by (mul fed by (mul fed by rsqrt))", "mul fed by (mul fed by rsqrt)", "mul fed by rsqrt")
_RMS_NORM = (
    *("_fused_rms_norm", "mul fed by (cast fed by (mul fed by rsqrt))", "mul fed by (mul fed by rsqrt)"),
    "mul fed by rsqrt",
)
_LINEAR = ("mm", "addmm", "_scaled_mm")
_ATTENTION = ("attention", "bmm fed by (view fed by expand)")
_CONVOLUTION = ("convolution",)
_BATCH_NORM = (
    *("_native_batch_norm_legit*", "_batch_norm_with_update*", "cudnn_batch_norm", "native_batch_norm"),
    *("add fed by (mul fed by (mul fed by rsqrt))", "mul fed by (sub feeding mul)", "mul fed by rsqrt"),
)
_CROSS_ENTROPY = ("nll_loss_forward", "nll_loss2d_forward", "neg fed by (squeeze fed by gather)")

_FORMS: Mapping[str, tuple[str, ...]] = {
    # products
    "linear dense fc proj projection gemm": _LINEAR,
    "matmul einsum mv dot tensordot": ("mm", "addmm", "bmm", "sum fed by mul"),
    # attention
    "sdpa scaleddotproductattention flashattention flashattn fa": _ATTENTION,
    "attn selfattention selfattn mha multiheadattention fa2 fa3": _ATTENTION,
    "attention memoryefficientattention efficientattention sdpaattention": _ATTENTION,
    "flexattention": ("higher_order.flex_attention",),
    # convolutions and pools
    "conv conv1d conv2d conv3d convolution": _CONVOLUTION,
    "convtranspose1d convtranspose2d convtranspose3d deconv": _CONVOLUTION,
    "maxpool2d maxpool1d maxpool": ("max_pool2d_with_indices", "_low_memory_max_pool*"),
    "avgpool1d avgpool2d avgpool": ("avg_pool2d",),
    "adaptiveavgpool2d adaptiveavgpool1d": ("_adaptive_avg_pool2d", "mean"),
    # norms
    "rmsnorm t5norm llamarmsnorm": _RMS_NORM,
    "layernorm": ("native_layer_norm", *_MEAN_NORM),
    "groupnorm": ("native_group_norm", *_MEAN_NORM),
    "batchnorm batchnorm1d batchnorm2d instancenorm": _BATCH_NORM,
    "norm": ("native_layer_norm", *_RMS_NORM, "linalg_vector_norm"),
    "normalize": ("div fed by (expand fed by clamp_min)",),
    # activations
    "silu swish sigmoidlinearunit": _SILU,
    "gelu gelunew quickgelu gelutanh": _GELU,
    "swiglu siluandmul": ("mul fed by silu", f"mul fed by ({_SIGMOID_PRODUCT})"),
    "geglu": ("mul fed by gelu", "mul fed by (mul fed by (add fed by erf))"),
    "activation act actfn nonlinearity": ("activation",),
    "relu6 hardtanh": ("hardtanh", "clamp_max fed by clamp_min"),
    "leakyrelu prelu": ("leaky_relu", "_prelu_kernel", "(aten.where fed by gt) and (aten.where fed by mul)"),
    "elu selu celu": ("elu", "celu", "aten.where fed by (mul fed by expm1)", "aten.where fed by expm1"),
    "softplus": ("softplus", "aten.where fed by log1p"),
    "mish": ("mish", "mul fed by (tanh fed by aten.where)"),
    "hardswish": ("hardswish", "div fed by (mul fed by clamp_max)"),
    "hardsigmoid": ("hardsigmoid", "div fed by (clamp_max fed by clamp_min)"),
    "logsigmoid": ("log_sigmoid_forward", "sub fed by log1p"),
    "softmax": ("_softmax", "div fed by exp"),
    "logsoftmax": ("_log_softmax", "sub fed by log"),
    "logsumexp": ("logsumexp", "add fed by log"),
    "dropout dropout1d dropout2d": ("native_dropout", "bernoulli", "bernoulli_", "mul fed by gt"),
    # losses
    "crossentropy crossentropyloss nllloss ce loss": _CROSS_ENTROPY,
    "mseloss mse": ("mse_loss", "mean fed by (pow fed by sub)"),
    "l1loss mae": ("mean fed by (abs fed by sub)",),
    "bcewithlogits binarycrossentropywithlogits": ("binary_cross_entropy_with_logits", "mean fed by (sub fed by sub)"),
    # lookups, looks and copies
    "embedding embed wte tokembeddings": ("embedding", "index"),
    "transpose t swapaxes mT permute rearrange": ("permute", "transpose", "t"),
    "reshape flatten unflatten viewas": ("view", "_unsafe_view", "clone"),
    "contiguous": ("clone",),
    "to float half bfloat16 type typeas astype": ("cast",),
    "chunk tensorsplit": ("split", "split_with_sizes"),
    "repeatinterleave repeatkv repeat tile": ("repeat", "clone fed by expand"),
    "cat concat concatenate stack": ("cat", "stack", "clone fed by expand"),
    "maskedfill": ("masked_fill", "aten.where"),
    "indexselect": ("index_select", "index"),
    "rsub": ("rsub", "sub"),
    "square": ("pow",),
    "std var variance": ("std", "var", "var_mean"),
    "allgather": ("all_gather",),
    "fsdp unshard gather_weights": ("all_gather where from parameter",),
    "rng randomops": ("random",),
    "all allops alloperators anything any": ("everything",),
}
TRACED_AS = {name: forms for names, forms in _FORMS.items() for name in names.split()}
"""By name, without capitals and underscores."""

NEVER_TRACED = frozenset(
    (
        *("linear", "softmax", "log_softmax", "dropout", "conv1d", "conv2d", "conv3d", "cross_entropy_loss"),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "nll_loss", "einsum", "selu", "relu6"),
        *("reshape", "flatten", "contiguous", "chunk", "to", "square", "repeat_interleave", "max_pool1d", "avg_pool1d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "all"),
    )
)
"""Operators of which a graph of a step holds others, whatever computes them; and one that few mean."""

MODULES = frozenset(
    (
        *("mlp", "ffn", "feed_forward", "feedforward", "self_attn", "attn", "layers", "layer", "block", "head"),
        *("lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv", "wq", "wk"),
        *("wv", "wo", "encoder", "decoder", "experts", "expert", "router", "gate", "moe", "embed_tokens"),
        *("tok_embeddings", "w1", "w2", "w3", "input_layernorm", "post_attention_layernorm", "ln_1", "ln_2"),
        *("c_attn", "c_proj", "c_fc"),
    )
)
"""Names of modules in models that no operator has."""

_PYTHON = (
    *("torch.nn.functional.", "torch.nn.", "nn.functional.", "functional.", "nn.", "F.", "torch.", "Tensor.", "np."),
)


@frozen
class Form:
    """One form of an operation: a selector, as text and resolved."""

    text: str
    selector: Selector
    is_whole: bool
    """True if its operators compute the whole operation."""


def python_name(text: str) -> str | None:
    """The function that a name of Python means, ``linear`` of ``torch.nn.functional.linear`` and of ``nn.Linear``;
    None for what is no such name."""
    for prefix in _PYTHON:
        if text.startswith(prefix) and "." not in text.removeprefix(prefix):
            return text.removeprefix(prefix)
    return None


def traced_texts(name: str) -> tuple[str, ...]:
    """Selectors of the forms in which an operation is traced, the likeliest first."""
    return TRACED_AS.get(name.replace("_", "").lower(), ())


@cache
def forms_of(name: str) -> tuple[Form, ...]:
    """The resolved forms, without the operator of the same name."""
    texts = (text for text in traced_texts(name) if text != name)
    return tuple(Form(text, selector_of_groups(text), _is_whole(text)) for text in texts)


def usual_forms(name: str) -> tuple[str, ...]:
    """The forms that are shown without a graph: a group, or the first two operators."""
    texts = tuple(text for text in traced_texts(name) if text != name)
    whole = texts[:1] if texts[:1] and texts[0] in group_names() else tuple(filter(_is_whole, texts))[:2]
    return whole or texts[:1]


def shown_forms(texts: Iterable[str]) -> str:
    """```mm` or `addmm```."""
    return joined([f"`{text}`" for text in texts], "or")


_BEFORE_A_SELECTOR = frozenset(("save", "recompute", "offload", "leave", "="))


def as_one(texts: Sequence[str]) -> str:
    """Several selectors as one that can replace a single word."""
    joined = ", ".join(texts)
    return f"({joined})" if " " in joined else joined


def in_place_of(span: Span, texts: Sequence[str]) -> str:
    """Like :func:`as_one`, without parentheses if the span is the whole selector of its statement."""
    text = span.source.text
    before, after = text[: span.start].rsplit("\n", 1)[-1].split(), text[span.end :].lstrip(" \t")[:1]
    whole = " ".join(before[-1:]) in _BEFORE_A_SELECTOR and after in ("", "\n", "\r", ";", "#")
    return ", ".join(texts) if whole else as_one(texts)


def _is_whole(text: str) -> bool:
    return " fed by " not in text


SELDOM_IN_GRAPHS = "APL150"
OF_BOTH = "APL151"


def doubtful_selectors(rule: Rule | Bucket | Scheduling) -> Iterator[Diagnostic]:
    """A note where a line is about names alone that graphs do not hold, a warning for each ``and`` of two operators. A
    line that is ``optional`` may match nothing."""
    if rule.optional:
        return
    inside = list(walk(rule.selector))
    leaves = [part for part in inside if not parts(part)]
    bare = [leaf.name for leaf in leaves if isinstance(leaf, Operator) and leaf.namespace is leaf.overload is None]
    if len(bare) == len(leaves) and NEVER_TRACED.issuperset(bare):
        for name, leaf in zip(bare, leaves, strict=True):
            texts = usual_forms(name)
            message = f"graphs of a step seldom hold `{name}`: it is traced as {shown_forms(texts)}"
            if texts == ("everything",):
                message = f"`{name}` is the operator of that name, and every node is `everything`"
            write = [in_place_of(leaf.span, texts)]
            yield diagnose(SELDOM_IN_GRAPHS, message, leaf.span, help=f"write `{', '.join(texts)}`", write=write)
    for part in inside:
        match part:
            case Intersection(Operator() as left, Operator() as right):
                if left.name != right.name and not is_magic(left.text + right.text):
                    names = left.text, right.text
                    message = "`{0} and {1}` keeps what is both, and no node is both `{0}` and `{1}`".format(*names)
                    help = "write `{}, {}` for the nodes of either".format(*names)
                    write = [in_place_of(part.span, names)]
                    yield diagnose(OF_BOTH, message, part.span, help=help, write=write)
