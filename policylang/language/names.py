"""Resolves selectors: looks up their names, gives figures their dimension, checks globs and versions.

Common names of operations are told the operators they are traced as, and which selectors seldom match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from attrs import define, evolve, field, frozen

from policylang.language import syntax
from policylang.language.diagnostics import Diagnostic, DiagnosticList, Related, Span, diagnose, removed
from policylang.language.globs import is_magic, name_glob_problem
from policylang.language.operators import (
    PLAIN_FUNCTIONS,
    OperatorTable,
    group_names,
    prelude_group,
    selector_of_groups,
    split_operator,
)
from policylang.language.predicates import check_path_glob, fit_predicate
from policylang.language.selectors import parts, rebuild, union_of, walk
from policylang.language.shown import did_you_mean, joined, nearest

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
    selector: syntax.Selector
    is_whole: bool
    """True if its operators compute the whole operation."""


def python_name(text: str) -> str | None:
    """The function that a name of Python means: ``linear`` of ``torch.nn.functional.linear``, and of ``nn.Linear``."""
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


def doubtful_selectors(rule: syntax.Rule | syntax.Bucket | syntax.Scheduling) -> Iterator[Diagnostic]:
    """A note where a line is about names alone that graphs do not hold, a warning for each ``and`` of two operators. A
    line that is ``optional`` may match nothing."""
    if rule.optional:
        return
    inside = list(walk(rule.selector))
    leaves = [part for part in inside if not parts(part)]
    operators = (leaf for leaf in leaves if isinstance(leaf, syntax.Operator))
    bare = [leaf.name for leaf in operators if leaf.namespace is leaf.overload is None]
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
            case syntax.Intersection(syntax.Operator() as left, syntax.Operator() as right):
                if left.name != right.name and not is_magic(left.text + right.text):
                    names = left.text, right.text
                    message = "`{0} and {1}` keeps what is both, and no node is both `{0}` and `{1}`".format(*names)
                    help = "write `{}, {}` for the nodes of either".format(*names)
                    write = [in_place_of(part.span, names)]
                    yield diagnose(OF_BOTH, message, part.span, help=help, write=write)


_THE_REST = frozenset(("default", "otherwise", "rest", "fallback", "others", "remaining", "undecided"))
_COLLECTIVES = frozenset(("communication", "communications", "comm", "comms", "collectives", "nccl", "network"))
_REGISTERED = (
    "a custom operator is known from a graph that calls it, `--graph`, or once its module is imported, `--import`"
)
_MAX_SUGGESTIONS = 50  # unknown words of one policy that get a did-you-mean: it costs milliseconds each


@define
class Definitions:
    """Resolves the names of one policy, statement by statement."""

    operators: OperatorTable
    later: dict[str, Span]
    """The first definition of each name."""
    lets: dict[str, syntax.Let] = field(factory=dict)
    """The resolved names so far, and the groups that were used."""
    diagnostics: DiagnosticList = field(factory=DiagnosticList)
    _mine: dict[str, syntax.Let] = field(factory=dict)
    _used: set[str] = field(factory=set)
    _known: dict[str, tuple[syntax.Operator | None, tuple[Diagnostic, ...]]] = field(factory=dict)
    """The operator of each word looked up so far, and its problems."""
    _suggestions: int = 0

    def define(self, let: syntax.Let, bundled: bool) -> None:
        """Take a ``let`` up; from here on its name is known."""
        earlier = self._mine.get(let.name)
        if earlier is not None:
            if earlier.span != let.span:  # else the same line, of a file that is included twice
                related = (Related("defined here before", earlier.span),)
                message, fixes = f"the name `{let.name}` is defined twice", [removed(let.span)]
                self.diagnostics.report("APL107", message, _name_span(let), related=related, fixes=fixes)
            return
        found = len(self.diagnostics)
        resolved = evolve(let, selector=self.resolve(let.selector, defining=let.name))
        self._mine[let.name] = let
        if bundled:
            self._used.add(let.name)
        elif len(self.diagnostics) == found:
            hidden, help = "group", "choose another name, unless that is what you want"
            if let.name not in group_names():
                help = f"choose another name; the operator is written with its namespace, `aten.{let.name}`"
                hidden = "operator" if self._is_operator(let.name) else ""
            if hidden:
                message = f"the name `{let.name}` hides the {hidden} of that name"
                self.diagnostics.report("APL111", message, _name_span(let), help=help)
        self.lets[let.name] = resolved

    def resolve(self, selector: syntax.Selector, *, defining: str | None = None) -> syntax.Selector:
        """The selector with its words looked up and its globs and figures checked."""

        def change(part: syntax.Selector) -> syntax.Selector:
            match part:
                case syntax.Word():
                    return self._look_up(part, defining)
                case syntax.Where():
                    return evolve(part, predicate=fit_predicate(part.predicate, self.diagnostics.append))
                case syntax.Union():
                    return union_of(part.parts, part.span)
                case syntax.InModule():
                    check_path_glob(part.glob, part.span, self.diagnostics.append)
            return part

        return rebuild(selector, change)

    def finish(self, *, library: bool) -> list[Diagnostic]:
        """All problems. Unused names are among them, unless this is a library of names for others."""
        for name, let in self._mine.items():
            if name not in self._used and not library:
                message, fixes = f"the name `{name}` is never used", [removed(let.span)]
                self.diagnostics.report("APL110", message, _name_span(let), fixes=fixes)
        return self.diagnostics

    def _look_up(self, word: syntax.Word, defining: str | None) -> syntax.Selector:
        text = word.text
        if text == defining:
            help = f"an operator of that name is written `aten.{text}`"
            write = [f"aten.{text}"] if self._is_known(f"aten.{text}") else []
            message = f"the name `{text}` is defined by itself"
            self.diagnostics.report("APL108", message, word.span, help=help, write=write)
            return word
        if text in self._mine:
            self._used.add(text)
            return syntax.Reference(text, span=word.span)
        if text in self.later:
            self._used.add(text)
            message = f"the name `{text}` is used before it is defined"
            related = Related("defined here", self.later[text])
            self.diagnostics.report("APL109", message, word.span, related=(related,))
            return word
        let = prelude_group(text)
        if let is not None:
            self.lets.setdefault(text, let)
            return syntax.Reference(text, span=word.span)
        return self._operator(word)

    def _operator(self, word: syntax.Word) -> syntax.Selector:
        if word.text not in self._known:
            before = len(self.diagnostics)
            operator = self._find_operator(word)
            self._known[word.text] = operator, tuple(self.diagnostics[before:])
        else:
            operator, wrong = self._known[word.text]
            self.diagnostics.extend(each.moved_to(word.span) for each in wrong)
        return word if operator is None else evolve(operator, span=word.span)

    def _find_operator(self, word: syntax.Word) -> syntax.Operator | None:
        text = word.text
        if (meant := self._meant_by(text)) is not None:
            message = f"`{text}` is not the name of an operator"
            self.diagnostics.report("APL101", message, word.span, help=meant[0], write=[meant[1]])
            return None
        if problem := name_glob_problem(text):
            self.diagnostics.report("APL112", f"the name `{text}` {problem}", word.span)
            return None
        operator = split_operator(text, self.operators.has_namespace)
        parts = text.split(".")
        if operator is None or not all(parts) or any(part.isdecimal() for part in parts):
            help = "an operator is written as `mm`, `aten.mm` or `aten.mm.default`; a module path follows `in`"
            self.diagnostics.report("APL101", f"`{text}` is not the name of an operator", word.span, help=help)
            return None
        found = self.operators.matches(operator.namespace, operator.name, operator.overload)
        if found:
            plain = all(name.startswith(f"{PLAIN_FUNCTIONS}.") for name in found)
            return evolve(operator, namespace=PLAIN_FUNCTIONS) if plain else operator
        return self._unknown(word, operator)

    def _meant_by(self, text: str) -> tuple[str, str] | None:
        """The help for foreign spellings (``aten::mm``, ``torch.mm``, ``nn.Linear``, ``[mm]``), and the replacement."""
        if text.startswith("[") and text.endswith("]"):
            inner = text[1:-1].strip()
            return f"write `{inner}`: selectors are joined without brackets", f"({inner})"
        plain = text.replace("::", ".").removeprefix("torch.ops.").removesuffix(".")
        if plain != text and "." not in plain.partition(".")[2].partition(".")[2]:
            return (f"write `{plain}`", plain) if self._is_known(plain) else None
        name = python_name(text)
        if name is None or self._is_known(text):
            return None
        traced = usual_forms(name)
        if traced:
            return f"write `{', '.join(traced)}`, which it is traced as", as_one(traced)
        return (f"write `{name}`", name) if self._is_known(name) else None

    def _is_known(self, text: str) -> bool:
        part = None if name_glob_problem(text) else split_operator(text, self.operators.has_namespace)
        return part is not None and bool(self.operators.matches(part.namespace, part.name, part.overload))

    def _unknown(self, word: syntax.Word, operator: syntax.Operator) -> syntax.Operator | None:
        parts = word.text.split(".")
        namespace = parts[0] if len(parts) > 1 else None
        only_met = namespace is not None and self.operators.is_only_met(namespace)
        listed = namespace is not None and self.operators.has_namespace(namespace)
        known = namespace is None or (not only_met and (self.operators.complete or listed))
        if not known and (operator.namespace is not None or not self._is_operator(parts[0])):
            message = f"no operator of the namespace `{namespace}` is known here; it is checked when applied"
            fix = f"a module path follows `in`: `everything in {word.text}`; {_REGISTERED}"
            if only_met:
                message = f"the graph does not call `{word.text}`, and others of its namespace are not known here"
                fix = _REGISTERED
            near = self._nearest(word.text)
            self.diagnostics.report("APL102", message, word.span, help=did_you_mean(near) or fix, write=near)
            return split_operator(word.text, lambda _: True) or operator
        kind = "operator" if namespace is not None else "operator, group or name"
        help, write = self._elsewhere(word.text)
        if help is None:
            write = self._nearest(word.text)
            help = did_you_mean(write)
        if help is None and namespace is not None and not listed and not self._is_operator(namespace):
            help = _REGISTERED
        self.diagnostics.report("APL101", f"there is no {kind} `{word.text}`", word.span, help=help, write=write)
        return None

    def _elsewhere(self, text: str) -> tuple[str | None, Sequence[str]]:
        """The help for a name that people use, and that no operator has, and its replacements."""
        if text in _COLLECTIVES:
            help = "write `collective` for all of them, or one of `all_gather`, `reduce_scatter`, `all_reduce`"
            return help, ("collective", "all_gather", "reduce_scatter", "all_reduce")
        if text in _THE_REST:
            return "what no rule matches is `undecided`: write `undecided -> save`", ()
        traced = usual_forms(text)
        if traced:
            return f"it is traced as {shown_forms(traced)}: write `{', '.join(traced)}`", (as_one(traced),)
        if text in ("layer", "layers"):
            return "the layers of a model are its blocks: `everything in block`, `everything in every 2nd block`", ()
        if text in MODULES:
            return f"a module path follows `in`: `everything in {text}`", (f"everything in {text}",)
        return None, ()

    def _is_operator(self, name: str) -> bool:
        return bool(self.operators.matches(None, name, None))

    def _nearest(self, text: str) -> tuple[str, ...]:
        self._suggestions += 1
        if self._suggestions > _MAX_SUGGESTIONS:
            return ()
        own = nearest(text, ["everything", *self._mine, *group_names()], limit=2) if "." not in text else ()
        return tuple(dict.fromkeys((*own, *self.operators.nearest(text))))[:3]


def _name_span(let: syntax.Let) -> Span:
    """The name in ``let NAME = …``."""
    start = let.span.text.find(let.name, len("let"))
    return Span(let.span.source, let.span.start + start, let.span.start + start + len(let.name))
