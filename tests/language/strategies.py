"""Trees that the language can write, for hypothesis."""

from fractions import Fraction

from hypothesis import strategies as st

from policylang.language import syntax as s
from policylang.language.predicates import FLAGS
from policylang.language.selectors import union_of

globs = st.sampled_from(
    ["layers.*", "/model.**.wo", "block", "0", "h.{0,1}", "layers.[0-3]", "a b", "save", "3rd", "first"]
)
signs = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
numbers = st.integers(1, 40)
scopes = st.none() | st.sampled_from(s.Scope)

seconds = st.floats(1e-12, 1e9) | st.integers(0, 10**15).map(lambda picoseconds: picoseconds / 1e12)
quantities = st.one_of(
    st.builds(
        s.Quantity, st.integers(0, 2**50).map(float) | st.sampled_from([6.4 * 2**30, 0.5, 1e15 + 3]), st.just("bytes")
    ),
    st.builds(s.Quantity, st.floats(0.001, 1e18), st.just("flops")),
    st.builds(s.Quantity, seconds, st.just("seconds")),
)
_counts = st.builds(s.Quantity, st.integers(0, 10**12).map(float) | st.floats(0.001, 1e9), st.just("number"))

tests = st.one_of(
    st.builds(
        lambda op, value: s.Compare("bytes", op, s.Quantity(value, "bytes")), signs, st.integers(0, 2**50).map(float)
    ),
    st.builds(
        lambda what, op, value: s.Compare(what, op, s.Quantity(value, "seconds")),
        st.sampled_from(["time", "time_per_gib"]),
        signs,
        seconds,
    ),
    st.builds(lambda op, value: s.Compare("flops", op, s.Quantity(value, "flops")), signs, st.floats(0.001, 1e18)),
    st.builds(s.Compare, st.sampled_from(["numel", "ndim", "users", "inputs", "group_size"]), signs, _counts),
    st.builds(lambda op, value, index: s.Compare("shape", op, value, index), signs, _counts, st.integers(-3, 3)),
    st.builds(s.Match, st.just("dtype"), st.sampled_from(["==", "!="]), st.sampled_from(["bfloat16", "float8*"])),
    st.builds(
        s.Match, st.just("device"), st.sampled_from(["==", "!="]), st.sampled_from(["cuda", "cuda:0", "3", "is"])
    ),
    st.builds(s.Match, st.just("module"), st.sampled_from(["==", "!="]), globs),
    st.builds(s.Is, st.sampled_from(FLAGS)),
    st.builds(s.Annotated, st.sampled_from(["ap_must_save", "saved", "save", "a.b", "two words", "3"])),
    st.builds(lambda size: s.CrossesCut(s.Quantity(size, "bytes")), st.integers(1, 2**50).map(float)),
    st.just(s.CrossesCut(None)),
)
predicates = st.recursive(
    tests,
    lambda inner: st.one_of(
        st.builds(s.Not, inner),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: s.And(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: s.Or(tuple(parts))),
    ),
    max_leaves=5,
)

block_sets = st.one_of(
    st.just(s.BlockSet("any")),
    st.builds(lambda n, start: s.BlockSet("every", n=n, start=start), numbers, numbers),
    st.builds(lambda kind, n: s.BlockSet(kind, n=n), st.sampled_from(["first", "last"]), numbers),
    st.builds(
        lambda kind, share: s.BlockSet(kind, share=share),
        st.sampled_from(["first", "last"]),
        st.integers(1, 10**9).map(lambda n: Fraction(n, 10**9)) | st.sampled_from([Fraction(1, 2), Fraction(1)]),
    ),
    st.builds(lambda low, more: s.BlockSet("range", low=low, high=low + more), st.integers(0, 9), st.integers(0, 9)),
)

atoms = st.sampled_from(
    [
        s.Everything(), s.Operator(None, "mm", None), s.Operator("aten", "add", "Tensor"),
        s.Operator("aten", "*attention*", None), s.Operator("aten", "where", None), s.Reference("matmul"),
        s.Reference("wait"),
    ]
)  # fmt: skip


def _around(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.builds(s.InModule, inner, globs, st.booleans()),
        st.builds(s.InBlock, inner, block_sets, st.booleans()),
        st.builds(s.Where, inner, predicates),
        st.builds(s.Ordinal, st.sampled_from(["first", "last", "nth"]), numbers, inner, st.none(), scopes),
        st.builds(s.Ordinal, st.just("every"), numbers, inner, st.none() | numbers, scopes),
        st.builds(s.Step, st.sampled_from(["users", "inputs"]), inner),
        st.builds(s.Chain, st.sampled_from(["after", "before", "through"]), inner),
        st.builds(lambda each: s.ChainOf(each), inner),
        st.builds(s.ChainOf, inner, st.sampled_from(["after", "before"]), inner),
        st.builds(s.Intersection, inner, inner),
        st.builds(s.Difference, inner, inner),
        st.builds(s.Feeding, inner, inner, st.booleans()),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: union_of(tuple(parts), s.NOWHERE)),
    )


selectors = st.recursive(atoms, _around, max_leaves=6)

expectations = st.one_of(
    st.builds(
        lambda figure, op, value, per: s.ExpectTotal(figure, op, s.Quantity(value, "bytes"), per),
        st.sampled_from(["saved", "recomputed"]),
        signs,
        st.integers(0, 2**50).map(float),
        st.booleans(),
    ),
    st.builds(
        lambda figure, op, percent: s.ExpectTotal(figure, op, s.Quantity(percent * 0.01, "fraction")),
        st.sampled_from(
            ["saved", "recomputed", "recomputed flops", "recomputed operators", "recomputed time", "exposed"]
        ),
        signs,
        st.integers(0, 100) | st.floats(0.001, 100),
    ),
    st.builds(
        lambda figure, op, value: s.ExpectTotal(figure, op, s.Quantity(value, "seconds")),
        st.sampled_from(["recomputed time", "exposed", "step time"]),
        signs,
        seconds,
    ),
    st.builds(
        lambda figure, op, value: s.ExpectTotal(figure, op, s.Quantity(value, "bytes")),
        st.sampled_from(["peak", "host memory", "host memory per host"]),
        signs,
        st.integers(0, 2**50).map(float),
    ),
    st.builds(
        s.ExpectCount, st.sampled_from(["exactly", "at least", "at most"]), st.integers(0, 99), selectors, scopes
    ),
    st.builds(
        s.ExpectFate, st.sampled_from(["every", "no"]), selectors, st.sampled_from(["saved", "recomputed", "offloaded"])
    ),
)

_collectives = st.sampled_from(
    [
        s.Reference("all_gather"),
        s.Reference("collective"),
        s.Operator("_c10d_functional", "all_reduce", None),
        s.Operator("*c10d_functional*", "all_*", None),
    ]
)
communicating = st.recursive(_collectives, _around, max_leaves=4)
_sizes = st.integers(1, 2**50).map(lambda size: s.Quantity(float(size), "bytes"))
_shares = st.integers(0, 100).map(lambda percent: s.Quantity(percent * 0.01, "fraction"))

ordering = st.one_of(
    st.builds(s.Bucket, communicating, numbers, st.none() | _sizes, st.booleans()),
    st.builds(s.Bucket, communicating, st.none(), _sizes, st.booleans()),
    st.builds(s.Prefetch, communicating, numbers, st.booleans()),
    st.builds(s.Delay, communicating, numbers, st.booleans()),
    st.builds(s.Overlap, communicating, st.none() | _sizes, st.none() | _sizes | _shares, st.booleans()),
    st.builds(s.KeepOrder, communicating, st.booleans()),
)
