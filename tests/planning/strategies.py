"""Random graphs and policies, for the comparison of the planner with the reference; sharded steps as small graphs; and
what is read off plans.

The random graphs have everything a planner can trip over: multi-output operators, collectives and their waits, the FSDP
fan-out, sizes, views, random and mutating operators, checkpoint regions, backward nodes among the forward ones."""

from collections.abc import Iterable
from fractions import Fraction

from attrs import frozen
from hypothesis import strategies as st

import policylang
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.language import syntax as s
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Action
from policylang.planning.capabilities import Capabilities
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.textgraph import GraphBuilder
from tests.support.trees import span

QUICK = DeviceProfile(
    name="quick",
    compute=dict.fromkeys(("bfloat16", "float32"), Rate.constant(1e11)),
    bandwidth=Rate.constant(1e9),
    networks=(Network(bandwidth=1e9, latency=4e-9),),
)
"""On which the operators of small graphs take nanoseconds."""
SPAN = span("any")
MODULES = ("", "head", "layers.0", "layers.0.attn", "layers.1.attn", "layers.1.mlp.up", "layers.2.attn")
PLAIN = (
    ("aten.mm.default", 0), ("aten.mm.default", Flag.COMPUTE), ("aten.add.Tensor", 0),
    ("aten.add.Scalar", Flag.RECORDED_SAVED), ("prims.convert_element_type.default", 0),
    ("aten.view.default", Flag.VIEW), ("aten.bernoulli.p", Flag.RANDOM), ("aten.mean.dim", Flag.READS_MUTATED),
    ("aten.copy_.default", Flag.WRITES), ("aten.bernoulli_.float", Flag.WRITES | Flag.REPEATABLE),
    ("aten.sym_size.int", Flag.SYMBOLIC), ("prims.inductor_seeds.default", Flag.SEED | Flag.RANDOM),
    ("aten._print.default", Flag.EFFECTFUL),
)  # fmt: skip
STEERING = ("aten.index.Tensor", "aten.gather.default", "aten.where.self")


@st.composite
def graphs(draw: st.DrawFn) -> Facts:
    builder = GraphBuilder()
    kinds = st.sampled_from(["parameter", "input", "buffer"])
    for number, kind in enumerate(draw(st.lists(kinds, min_size=1, max_size=4))):
        builder.add(f"in_{number}", kind, ())
    builder.add("size", "input", (), flags=Flag.SYMBOLIC)
    builder.add("tangent", "tangent", ())
    for _ in range(draw(st.integers(1, 14))):
        part = draw(st.sampled_from([_plain, _plain, _plain, _backward, _fan_out, _multi_output, _collective, _choice]))
        part(draw, builder)
    whole = {row["owners"] for at, row in enumerate(builder.rows) if row["owners"] != at}
    returned = [row for row in draw(_some_rows(builder, 0, 2)) if row not in whole]  # no graph returns a tuple
    builder.add("output", "output", tuple(returned))
    return builder.facts(GraphKind.JOINT)


def _some_rows(builder: GraphBuilder, low: int, high: int) -> st.SearchStrategy[list[int]]:
    """Rows to read: mostly recent ones, so that chains grow."""
    last = len(builder.rows) - 1
    recent = st.integers(max(0, last - 2), last)
    row = st.one_of(recent, recent, st.integers(0, last)).filter(lambda row: builder.rows[row]["ops"] != "output")
    return st.lists(row, min_size=low, max_size=high, unique=True)


def _forward_rows(builder: GraphBuilder, low: int, high: int) -> st.SearchStrategy[list[int]]:
    """Rows that a forward node may read."""
    rows = [row for row, node in enumerate(builder.rows) if node["phases"] != 2 and node["input_kinds"] != 4]
    return st.lists(st.sampled_from([*rows, *rows[-2:], *rows[-2:]]), min_size=low, max_size=high, unique=True)


def _add(draw: st.DrawFn, builder: GraphBuilder, target: str, inputs: list[int], flags: int, **more) -> int:
    tagged = draw(st.sampled_from([True, False, False, False, False]))
    return builder.add(
        f"n_{len(builder.rows)}",
        target,
        tuple(inputs),
        flags=flags,
        module=draw(st.sampled_from(MODULES)),
        bytes=draw(st.sampled_from([0, 8, 64])),
        numel=draw(st.sampled_from([1, 4])),
        flops=draw(st.sampled_from([0, 100])),
        shape=draw(st.sampled_from(["", "4", "2x4", "2x2x2"])),
        dtype=more.pop("dtype", None) or draw(st.sampled_from(["", "bfloat16", "float32", "int64"])),
        device=draw(st.sampled_from(["", "cpu", "cuda:0"])),
        annotations=draw(st.sampled_from([(), (), (), ("mine",), ("mine", "seen")])),
        region=draw(st.sampled_from(["0", "1"])) if tagged else None,
        tag=draw(st.sampled_from(["PREFER_RECOMPUTE", "MUST_SAVE", "MUST_RECOMPUTE"])) if tagged else None,
        **more,
    )


def _plain(draw: st.DrawFn, builder: GraphBuilder) -> None:
    target, flags = draw(st.sampled_from(PLAIN))
    _add(draw, builder, target, draw(_forward_rows(builder, 1, 2)), flags)


def _backward(draw: st.DrawFn, builder: GraphBuilder) -> None:
    builder.add(f"n_{len(builder.rows)}", "aten.mul.Tensor", tuple(draw(_some_rows(builder, 1, 3))), backward=True)


def _multi_output(draw: st.DrawFn, builder: GraphBuilder) -> None:
    target = draw(st.sampled_from(["aten.native_layer_norm.default", "higher_order.flex_attention"]))
    flags = Flag.MULTI_OUTPUT | draw(st.sampled_from([0, 0, Flag.RANDOM]))
    owner = _add(draw, builder, target, draw(_forward_rows(builder, 1, 2)), flags)
    for _ in range(draw(st.integers(0, 3))):
        _add(draw, builder, "builtin.getitem", [owner], draw(st.sampled_from([0, 0, Flag.SYMBOLIC])))


def _choice(draw: st.DrawFn, builder: GraphBuilder) -> None:
    """What steers: of floats or of whole numbers, told in one result or in pieces, read by what goes by it or not."""
    read = draw(_forward_rows(builder, 1, 1))
    if draw(st.booleans()):
        read = [_add(draw, builder, draw(st.sampled_from(["aten.argsort.default", "aten.max.default"])), read, 0)]
    target = draw(st.sampled_from(["aten.topk.default", "aten.sort.stable", "aten.argmax.default"]))
    if target == "aten.argmax.default":
        chosen = _add(draw, builder, target, read, 0, dtype="int64")
    else:
        owner = _add(draw, builder, target, read, Flag.MULTI_OUTPUT)
        builder.rows[owner]["dtypes"] = ""
        _add(draw, builder, "builtin.getitem", [owner], 0, dtype="float32")
        chosen = _add(draw, builder, "builtin.getitem", [owner], 0, dtype="int64")
    if draw(st.booleans()):
        _add(draw, builder, draw(st.sampled_from(STEERING)), [chosen, *draw(_forward_rows(builder, 1, 1))], 0)


def _fan_out(draw: st.DrawFn, builder: GraphBuilder) -> None:
    """``split → getitem* → cat``, at times with a piece missing or a reader too many."""
    split = _add(draw, builder, "aten.split.Tensor", draw(_forward_rows(builder, 1, 1)), Flag.MULTI_OUTPUT | Flag.VIEW)
    count = draw(st.integers(1, 3))
    pieces = [_add(draw, builder, "builtin.getitem", [split], 0) for _ in range(count)]
    if draw(st.sampled_from([True, False, False])):
        _plain(draw, builder)
    read = pieces[draw(st.sampled_from([0, 0, 0, 1])) :] or pieces
    _add(draw, builder, "aten.cat.default", read, 0)


def _collective(draw: st.DrawFn, builder: GraphBuilder) -> None:
    gather = "_c10d_functional.all_gather_into_tensor.default"
    group = draw(st.sampled_from(["dp:4", "tp:8"]))
    row = _add(draw, builder, gather, draw(_forward_rows(builder, 1, 1)), Flag.COLLECTIVE, group=group)
    if draw(st.booleans()):
        _add(draw, builder, "_c10d_functional.wait_tensor.default", [row], 0)


# --- policies ------------------------------------------------------------------------------------------------------
GLOBS = ["layers.*", "/layers.*", "layers.{0,2}", "layers.[0-1].attn", "attn"]
GLOBS += ["**.attn", "layers.**", "/layers.**.up", "l*.1", "none.*"]
NAMES = ["mm", "add", "topk", "arg*", "*", "*e*", "getitem", "wait_tensor", "split", "cat", "view", "all_gather*"]
NAMES += ["{mm,add}", "none", "bernoulli", "bernoulli_"]

NOTES = ("seen", "mine")
PROPERTIES = (
    *("crosses block", "feeds backward", "is view", "is random", "is multi_output", "is mutated", "user tagged"),
    *("recorded saved", *(f"{made} {of}" for made in ("from", "gathered") for of in ("parameter", "buffer", "input"))),
)

operators = st.builds(
    s.Operator,
    namespace=st.sampled_from([None, None, None, "aten", "*d*"]),
    name=st.sampled_from(NAMES),
    overload=st.sampled_from([None, None, "default", "T*"]),
    span=st.just(SPAN),
)
block_sets = st.one_of(
    st.just(s.BlockSet("any")),
    st.builds(s.BlockSet, st.just("every"), n=st.integers(1, 3), start=st.integers(1, 3)),
    st.builds(s.BlockSet, st.sampled_from(["first", "last"]), n=st.integers(1, 2)),
    st.builds(
        s.BlockSet, st.sampled_from(["first", "last"]), share=st.integers(1, 100).map(lambda n: Fraction(n, 100))
    ),
    st.builds(s.BlockSet, st.just("range"), low=st.integers(0, 1), high=st.integers(0, 2)),
)


def _quantities(kind: str, *values: float) -> st.SearchStrategy[s.Quantity]:
    return st.sampled_from(values).map(lambda value: s.Quantity(value, kind, span=SPAN))


_numbers = _quantities("number", 0, 1, 2, 4, 8, 64, 100)
cut_sizes = _quantities("number", 1, 8, 16, 64, 100, 128, 200, 1000)
_times = _quantities("seconds", 0, 1e-9, 4e-9, 8e-9, 64e-9, 1e-7, 1, 5)
_comparisons = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
_plain_quantities = st.sampled_from(["bytes", "numel", "ndim", "flops", "users", "inputs", "group_size"])
_equal_or_not = st.sampled_from(["==", "!="])
_PATTERNS = {"dtype": ["bfloat16", "float*"], "device": ["cpu", "cuda", "cuda:*"], "module": GLOBS}
_PATTERNS["overload"] = ["default", "T*"]
_leaf_predicates = st.one_of(
    st.builds(s.Compare, _plain_quantities, _comparisons, _numbers, span=st.just(SPAN)),
    st.builds(s.Compare, st.just("shape"), _comparisons, _numbers, st.integers(0, 2), span=st.just(SPAN)),
    st.one_of(
        *(
            st.builds(s.Match, st.just(name), _equal_or_not, st.sampled_from(patterns), span=st.just(SPAN))
            for name, patterns in _PATTERNS.items()
        )
    ),
    st.builds(s.Is, st.sampled_from(PROPERTIES), span=st.just(SPAN)),
    st.builds(s.Compare, st.sampled_from(s.TIMES), _comparisons, _times, span=st.just(SPAN)),
    st.builds(s.CrossesCut, cut_sizes, span=st.just(SPAN)),
    st.builds(s.Annotated, st.sampled_from(NOTES), span=st.just(SPAN)),
)
predicates = st.recursive(
    _leaf_predicates,
    lambda inner: st.one_of(
        st.builds(s.Not, inner, span=st.just(SPAN)),
        st.builds(s.And, st.tuples(inner, inner), span=st.just(SPAN)),
        st.builds(s.Or, st.tuples(inner, inner), span=st.just(SPAN)),
    ),
    max_leaves=4,
)


def selectors(lets: tuple[str, ...]) -> st.SearchStrategy[s.Selector]:
    leaves = [operators, operators, st.just(s.Everything(span=SPAN))]
    if lets:
        leaves.append(st.sampled_from(lets).map(lambda name: s.Reference(name, span=SPAN)))
    return st.recursive(st.one_of(leaves), _grown, max_leaves=5)


def _grown(inner: st.SearchStrategy[s.Selector]) -> st.SearchStrategy[s.Selector]:
    here = st.just(SPAN)
    counts = st.integers(1, 3)
    scopes = st.sampled_from([None, *s.Scope])
    return st.one_of(
        st.builds(s.InModule, inner, st.sampled_from(GLOBS), st.booleans(), span=here),
        st.builds(s.InBlock, inner, block_sets, st.booleans(), span=here),
        st.builds(s.Ordinal, st.sampled_from(["first", "last", "nth"]), counts, inner, st.none(), scopes, span=here),
        st.builds(s.Ordinal, st.just("every"), counts, inner, st.one_of(st.none(), counts), scopes, span=here),
        st.builds(s.Where, inner, predicates, span=here),
        st.builds(s.Union, st.lists(inner, min_size=2, max_size=3).map(tuple), span=here),
        st.builds(s.Intersection, inner, inner, span=here),
        st.builds(s.Difference, inner, inner, span=here),
        st.builds(s.Feeding, inner, inner, st.booleans(), span=here),
        st.builds(s.Step, st.sampled_from(["users", "inputs"]), inner, span=here),
        st.builds(s.Chain, st.sampled_from(["after", "before", "through"]), inner, span=here),
        st.builds(s.ChainOf, inner, st.none(), st.none(), span=here),
        st.builds(s.ChainOf, inner, st.sampled_from(["after", "before"]), inner, span=here),
    )


@st.composite
def policies(draw: st.DrawFn) -> s.Policy:
    lets: dict[str, s.Let] = {}
    for name in ("a", "b")[: draw(st.integers(0, 2))]:
        lets[name] = s.Let(name, draw(selectors(tuple(lets))), span=SPAN)
    rules = st.builds(
        s.Rule,
        st.sampled_from([Action.SAVE, Action.RECOMPUTE, Action.RECOMPUTE, Action.MUST_RECOMPUTE, Action.LEAVE]),
        selectors(tuple(lets)),
        optional=st.booleans(),
        override=st.booleans(),
        span=st.just(SPAN),
    )
    blocks = draw(st.sampled_from([None, None, "layers.*", "/layers.*", "layers.{0,2}", "layers.[0-1].attn", "none.*"]))
    fate = draw(st.sampled_from([None, "auto", "save", "recompute"]))
    return s.Policy(
        name="random",
        lets=lets,
        blocks=None if blocks is None else s.Blocks(blocks, span=SPAN),
        rules=tuple(draw(st.lists(rules, max_size=4))),
        undecided=None if fate is None else s.Undecided(fate, span=SPAN),
        rewrites=(),
        expectations=(),
    )


PATH = "the joint-graph partitioner"
JOINT = Capabilities(PATH, replays_random=True, undecided="auto")


def planned(facts: Facts, rules: str, capabilities: Capabilities = JOINT) -> Plan:
    return plan(policylang.parse(rules), facts, capabilities)


def actions(made: Plan) -> dict[str, str]:
    """Node name to what was decided, ``save``, ``recompute``, ``auto``, for every forward value."""
    return {
        made.facts.names[row]: "auto" if decision.action is None else decision.action.name.lower()
        for row, decision in enumerate(made.decisions)
        if decision is not None
    }


def only(found: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    """The one diagnostic of a plan, which must have this code."""
    assert [diagnostic.code for diagnostic in found] == [code], [diagnostic.message for diagnostic in found]
    return found[0]


def names(facts: Facts, rows: Iterable[int]) -> list[str]:
    return [facts.names[row] for row in rows]


GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
WAIT = "_c10d_functional.wait_tensor.default"
CAST = "prims.convert_element_type.default"
SHARD = {"shape": (16, 32), "bytes": 1 << 10, "dtype": "bfloat16", "device": "cuda:0", "numel": 1 << 9}
FULL = {"shape": (32, 64), "bytes": 1 << 12, "dtype": "bfloat16", "device": "cuda:0", "numel": 1 << 11}


@frozen
class Options:
    blocks: int = 3
    casts: bool = True
    """Whether each shard is cast before it is gathered."""
    regathers: bool = False
    """Whether the backward gathers weights again, as a traced step does where nothing is kept."""
    head: bool = False
    """Whether something multiplies behind the last block."""
    embedding: bool = False
    activations: bool = False
    """Whether each block gathers what it is given, as tensor parallelism does."""
    unknown: int = -1
    """The block, if any, that calls an operator that nobody knows."""
    labelled: bool = False
    """Whether backward nodes have module paths."""


class _Step:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.builder = GraphBuilder()
        self.weights: dict[str, int] = {}
        self.params: dict[str, int] = {}

    def add(self, name: str, target: str, *inputs: int, module: str = "", backward: bool = False, **more) -> int:
        path = module if not backward or self.options.labelled else ""
        return self.builder.add(name, target, inputs, module=path, backward=backward, **more)

    def gathered(self, name: str, module: str, backward: bool = False) -> int:
        """A weight: of its shard, cast or not, gathered and awaited."""
        tag = f"{name}_again" if backward else name
        where = {"module": module, "backward": backward}
        source = self.params[name]
        if self.options.casts:
            source = self.add(f"cast_{tag}", CAST, source, **where, **SHARD)
        gather = self.add(f"gather_{tag}", GATHER, source, **where, flags=Flag.COLLECTIVE, group="dp:4", **FULL)
        return self.add(f"wait_{tag}", WAIT, gather, **where, **FULL)

    def product(self, name: str, *inputs: int, **more) -> int:
        return self.add(name, "aten.mm.default", *inputs, flops=1 << 20, flags=Flag.COMPUTE, **more, **FULL)

    def facts(self) -> Facts:
        options, builder = self.options, self.builder
        places = [("embed", "embed")] * options.embedding
        places += [(str(number), f"layers.{number}") for number in range(options.blocks)]
        places += [("head", "head")] * options.head
        for name, _ in places:
            self.params[name] = builder.add(f"param_{name}", "parameter", (), input_name=f"{name}.weight", **SHARD)
        x = builder.add("x", "input", (), **FULL)
        tangent = builder.add("tangent", "tangent", (), **FULL)
        made: list[tuple[str, str, int, int, int]] = []
        for name, module in places:
            weight = self.gathered(name, module)
            given = x
            if options.activations and name.isdigit():
                gather = self.add(f"tp_{name}", GATHER, x, module=module, flags=Flag.COLLECTIVE, group="tp:2", **FULL)
                given = self.add(f"tp_wait_{name}", WAIT, gather, module=module, **FULL)
            normed = self.add(f"norm_{name}", "aten.mul.Tensor", given, x, module=module, **FULL)
            product = self.product(f"mm_{name}", normed, weight, module=module)
            if name == str(options.unknown):
                product = self.add(f"unknown_{name}", "mylib.dispatch.default", product, module=module, **FULL)
            x = self.add(f"add_{name}", "aten.add.Tensor", product, x, module=module, **FULL)
            made.append((name, module, normed, weight, x))
        loss = self.add("loss", "aten.sum.default", x, **SHARD)
        gradient, returned = tangent, []
        for name, module, normed, weight, _ in reversed(made):
            if options.regathers:
                weight = self.gathered(name, module, backward=True)
            where = {"module": module, "backward": True}
            given = self.product(f"dx_{name}", gradient, weight, **where)
            dw = self.product(f"dw_{name}", normed, gradient, **where)
            scatter = self.add(f"scatter_{name}", SCATTER, dw, **where, flags=Flag.COLLECTIVE, group="dp:4", **SHARD)
            wait = self.add(f"reduced_{name}", WAIT, scatter, **where, **SHARD)
            returned.append(self.add(f"mean_{name}", "aten.div.Tensor", wait, **where, **SHARD))
            gradient = self.add(f"dadd_{name}", "aten.add.Tensor", gradient, given, **where, **FULL)
        builder.add("output", "output", (loss, *returned, gradient))
        return builder.facts(GraphKind.JOINT)


def sharded_step(**options) -> Facts:
    return _Step(Options(**options)).facts()
