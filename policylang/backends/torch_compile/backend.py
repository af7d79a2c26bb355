"""A policy under ``torch.compile``: a backend over Inductor or AOTAutograd alone, a pass, or a partitioner.

In a list of passes, a pass does what ``policylang.apply`` does. Behind a hook of Inductor's it writes tags for the
partitioner that comes next, PyTorch's min-cut, which knows no others than these; nobody audits what that makes of them;
and where Inductor takes a graph from its caches, the pass is not called at all.

Behind ``custom_partitioner_fn`` nobody wraps the compiled graph, as ``policylang.backend`` does. So every graph is
checked against the whole policy, and where something has to happen before a graph runs that a cache would leave out
(ranks compare plans, process groups are made), the caches of other processes are not used.
"""

from __future__ import annotations

import atexit
import inspect
import operator
import re
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from attrs import evolve
from torch import fx, nn
from torch.fx.node import map_arg

from policylang.backends import applied_plans, caching, refusals
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.eager.session import Session, innermost, session_behind
from policylang.backends.finalize import HookPath
from policylang.backends.fsdp_weights import weights_among, weights_of_blocks
from policylang.backends.joint import JointPartitioner, partitions
from policylang.backends.path import apply_policy
from policylang.backends.runtime import PREFIX
from policylang.backends.torch_compile import inductor
from policylang.backends.torch_compile.inductor import Inner, KeyedPartitioner, KeyedPass
from policylang.errors import PolicyError, PolicyGraphError, PolicyMatchError, PolicyWarning
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind
from policylang.graph.phases import attribute, normalise, raw_path
from policylang.language.diagnostics import Diagnostic, Source, Span
from policylang.language.shown import listed
from policylang.language.syntax import Blocks, Policy
from policylang.planning import statement_errors
from policylang.planning.decisions.rule_warnings import telling_apart
from policylang.planning.plan import digest_of
from policylang.ranks.comparison import AgreedAccounts, comparing
from policylang.torch_compat import compilers
from policylang.torch_compat.compilers import FrameLeft, is_profiling, named_range
from policylang.torch_compat.distributed import mesh_ranks
from policylang.torch_compat.eager import compiled_around

WRONG_HOOK = refusals.Problem(
    "APL331",
    "behind `{hook}` this is a {kind} graph, where nothing is decided about what is saved",
    "set `joint_custom_post_pass`; lines that rewrite or order collectives are applied here by "
    "`policylang.backend`, or by a pass in your list of passes",
)
ORDER_NOT_KEPT = refusals.Problem(
    "APL344",
    "`custom_partitioner_fn` cannot keep the order of this line: Inductor sorts both graphs anew",
    "compile with `policylang.backend`, which has Inductor keep it",
)


class PolicyPass(KeyedPass):
    """The result of :func:`pass_`."""

    def __init__(self, policy: Policy, mesh: Any = None, agree: bool = True) -> None:
        self.policy = policy
        self.mesh = mesh
        self.agree = agree
        self.__name__ = f"apl_{policy.name}"  # what lists of passes call it in their logs
        ranks = () if mesh is None else (tuple(mesh.mesh_dim_names or ()), mesh_ranks(mesh))
        self._key = f"{caching.policy_key(policy, root='')}:{ranks!r}"

    def __repr__(self) -> str:
        return f"policylang.pass_({self.policy.name!r})"

    def __call__(self, graph: fx.Graph | fx.GraphModule, *ignored: Any, **also_ignored: Any) -> fx.GraphModule | None:
        """Apply the policy, in place. The other arguments of passes (example inputs) are not needed. Raises as
        ``policylang.apply`` does, and behind a hook with what cannot be done there."""
        if isinstance(graph, fx.GraphModule):
            return apply_policy(graph, self.policy, self.mesh, agree=self.agree)
        if not isinstance(graph, fx.Graph):
            raise refusals.not_a_graph(graph, "a pass is called with a graph module or a graph")
        owner = graph.owning_module
        gm = owner if owner is not None else fx.GraphModule(nn.Module(), graph)
        hooks = compilers.hooks_that_hold(self)
        if not hooks:
            apply_policy(gm, self.policy, self.mesh, agree=self.agree)
            return None
        try:
            self._tag(gm, hooks)
        except PolicyError as error:
            raise compilers.through_dynamo(error, sys._getframe()) from None
        return None

    def _tag(self, gm: fx.GraphModule, hooks: tuple[str, ...]) -> None:
        """Write the policy's tags on a joint graph, for min-cut."""
        facts = collect(gm, mesh=self.mesh)
        if facts.kind is GraphKind.FORWARD and all(name.startswith("joint_") for name in hooks):
            return  # a model that runs without gradients: it keeps nothing, so nothing is decided
        path = HookPath()
        if facts.kind not in path.entry.kinds:
            raise WRONG_HOOK.error(hook=hooks[0], kind=facts.kind.value)
        path.apply(gm, self.policy, facts)


_INDUCTOR = "inductor"  # inductor's name for itself when it calls a partitioner
_THIS_PROCESS = uuid.uuid4().hex


class PolicyPartitioner(KeyedPartitioner):
    """The result of :func:`partitioner`."""

    def __init__(self, policy: Policy, root: str = "", agree: bool = True) -> None:
        self.policy = policy
        self.root = root
        self.agree = agree
        self._partitioner = JointPartitioner(policy, root=root)
        self._key = caching.policy_key(policy, root=root)
        self.findings: list[applied_plans.Findings] = []
        """The findings on each graph that it split in this process, in order."""
        self._known: dict[int, AgreedAccounts] = {}
        """By the code that Dynamo compiles, the graphs that ranks have agreed on."""

    def __repr__(self) -> str:
        root = f", root={self.root!r}" if self.root else ""
        return f"policylang.partitioner({self.policy.name!r}{root})"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph. Raises as ``policylang.partition`` does, and ``PolicyMatchError`` for a policy that
        schedules if Inductor is going to compile the result: nothing makes it keep the order."""
        known = self._known.setdefault(compilers.code_being_compiled(), [])
        topic = inductor.topic_of("splitting", "a joint graph", self.root)
        settings = inductor.comparable_settings
        try:
            if self.policy.scheduling and options.get("compiler") == _INDUCTOR:
                raise ORDER_NOT_KEPT.refused(self.policy.scheduling[0].span)
            with comparing(topic, self.agree, known=known, settings=settings), partitions() as done:
                halves = self._partitioner(gm, joint_inputs, **options)
        except PolicyError as error:
            if not compilers.dynamo_graphs():
                raise
            raise compilers.through_dynamo(error, sys._getframe()) from None
        self.findings.extend(applied_plans.findings_of(each.applied) for each in done)
        return halves

    def uuid(self) -> str:
        """Identifies the partitioner in torch's cache keys, with what it reads of Dynamo's graph beside its code."""
        context = caching.context_of(compilers.dynamo_graphs())
        surroundings = caching.groups_key(self.policy), caching.formulas_key()
        compares = self.agree and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # where something has to happen before a graph runs, the caches of other processes are kept away
        process = _THIS_PROCESS if compares or self.policy.rewrites else ""
        return ":".join((self._key, context, *surroundings, process))

    def __copy__(self) -> PolicyPartitioner:
        return self

    def __deepcopy__(self, memo: object) -> PolicyPartitioner:
        return self


def of_compiled(subject: Any) -> Sequence[applied_plans.Findings] | None:
    """The findings by graph and module that runs it, in order of compilation; None where it is not compiled by us."""
    if isinstance(subject, PolicyPartitioner):
        return tuple(subject.findings)
    uses = graph_uses_of(subject)
    return None if uses is None else _findings(uses)


def of_checkpoints(subject: Any) -> Sequence[applied_plans.Findings] | None:
    """The findings by block and kind of call, in the order of the blocks; then by graph compiled in checkpoints or
    around them, and module that runs it. None without a checkpoint of ours."""
    sessions = sessions_of(subject)
    if not sessions:
        return None
    found: list[applied_plans.Findings] = []
    for region in (region for session in sessions for region in session.regions.values()):
        for kept in region.kept.values():
            each = applied_plans.findings_of(applied_plans.AppliedPlan("eager", kept.instructions.plan, kept.audit))
            found.append(evolve(each, report=evolve(each.report, label=region.root)))
    compiled = [session for session in sessions if session.compiled]
    if not compiled:
        return found
    # of the whole subject, where it is a model of which only parts are checkpoints
    modules = [subject] if isinstance(subject, nn.Module) else [block for each in compiled for block in each.regions]
    uses = [use for module in modules for use in graph_uses_of(module) or ()]
    if not uses:
        uses = [applied_plans.GraphUse(graph) for session in compiled for graph in session.graphs]
    return [*found, *_findings(uses)]


def _findings(uses: Iterable[applied_plans.GraphUse]) -> list[applied_plans.Findings]:
    """The findings of a graph as often as modules run it: each of them keeps what the graph keeps. With what the
    generated code was read to do, which is known of the backward only once that has run."""
    every = ((use.graph.code, found) for use in uses for _ in range(use.modules) for found in use.graph.findings)
    return [
        found if code is None else evolve(found, report=evolve(found.report, code=code.reports()))
        for code, found in every
    ]


def watched(
    compiled: Callable[..., Any],
    graph: applied_plans.CompiledGraph,
    is_answered: Callable[[], bool],
    check: Callable[[], None],
) -> Callable[..., Any]:
    """``compiled``, with ``check`` called when the first backward through it starts, unless it ``is_answered`` by then;
    where no output leads to a backward, at the second call. By then every graph of the forward has been compiled: that
    is the earliest moment at which "matches nothing" is known, and the user has lost nothing but one forward."""
    unhooked = False

    def call(*arguments: Any) -> Any:
        nonlocal unhooked
        graph.note_call(arguments)
        if is_answered():
            return compiled(*arguments)
        if unhooked:
            check()
        outputs = compiled(*arguments)
        if not is_answered():
            functions = {each.grad_fn: None for each in outputs if isinstance(each, torch.Tensor)}
            functions.pop(None, None)
            for function in functions:
                function.register_prehook(lambda gradients: check())
            unhooked = not functions
        return outputs

    return call


_THROUGH_FORWARD = re.compile(r"(\.forward)+\.__self__")
"""Dynamo's name of a module that it reaches through our ``forward``: ``layers.0.forward.__self__``."""


def take_out(gm: fx.GraphModule) -> tuple[tuple[Session, ...], Session | None]:
    """Inline each checkpoint of ours, nested ones included. Returns their sessions; and, if the graph was one
    checkpoint and nothing else, the session of the model whose block it is, compiled separately."""
    found: dict[Session, None] = {}
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_") and node.target is not operator.getitem]
    only = _behind(gm, calls[0]) if len(calls) == 1 else None
    alone = only[0] if only is not None and is_part_of_block(only[1], only[0]) else None
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for module in graphs:
        inside: dict[Session, None] = {}
        pending = list(module.graph.nodes)
        while pending:
            node = pending.pop()
            behind = _behind(module, node)
            if behind is not None:
                inside[behind[0]] = None
                pending += _inline(module, node, behind[1])
        if inside:
            found.update(inside)
            module.delete_all_unused_submodules()
            module.recompile()
    if found:
        for node in (node for module in graphs for node in module.graph.nodes):
            if stack := node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = {
                    key: (_straight(entry[0]), *entry[1:]) if isinstance(entry, tuple) else entry
                    for key, entry in stack.items()
                }
    return tuple(found), alone


def _behind(module: fx.GraphModule, node: fx.Node) -> tuple[Session, fx.GraphModule] | None:
    """The session and the graph of a checkpoint of ours; None for any other node."""
    kind, context = compiled_around()
    if node.op != "call_function" or node.target is not kind or not node.args:
        return None
    holder = node.args[0]
    body = attribute(module, str(holder.target)) if isinstance(holder, fx.Node) and holder.op == "get_attr" else None
    session = session_behind(body.meta.get(context)) if isinstance(body, fx.GraphModule) else None
    return None if session is None else (session, body)


def is_part_of_block(gm: fx.GraphModule, session: Session) -> bool:
    """True if no module path of a graph leads to a block: then it starts inside one."""
    paths = {normalise(_straight(raw_path(node.meta)))[1] for node in gm.graph.nodes}
    names = [name for name in session.block_names() if name]
    return not any(path == name or path.startswith(f"{name}.") for path in paths for name in names)


def _inline(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """The nodes that replace a checkpoint."""
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(inputs, node.args[1:], strict=True))
    with module.graph.inserting_before(node):
        output = module.graph.graph_copy(body.graph, values)
    made = [values[old] for old in body.graph.nodes if old.op not in ("placeholder", "output")]
    for new in made:
        if new.op == "get_attr":
            stem = str(new.target).replace(".", "_")
            name = next(free for free in (f"{stem}_{number}" for number in count()) if not hasattr(module, free))
            setattr(module, name, attribute(body, str(new.target)))
            new.target = name
    _replace(node, output)
    return made


def _replace(node: fx.Node, value: Any) -> None:
    """Let all who read a checkpoint read the values that its graph returns."""
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(value, tuple | list):
            for reader in list(user.users):
                _change(reader, user, value[int(user.args[1])])
            user.graph.erase_node(user)
        else:
            _change(user, node, value)
    node.graph.erase_node(node)


def _change(user: fx.Node, old: fx.Node, new: Any) -> None:
    def changed(each: fx.Node) -> Any:
        return new if each is old else each

    user.args = map_arg(user.args, changed)
    user.kwargs = map_arg(user.kwargs, changed)


def _straight(path: str) -> str:
    return _THROUGH_FORWARD.sub("", path)


_NOWHERE = Span(Source("<block>", ""), 0, 0)

_live: WeakSet[PolicyBackend] = WeakSet()
_births = count()
_never_applied: dict[int, tuple[str, int]] = {}
"""By number, the backends that have compiled no graph with gradients: the policy, and when each was made."""


class PolicyBackend:
    """The result of :func:`backend`, for ``torch.compile(backend=...)`` or ``module.compile(backend=...)``."""

    def __init__(self, policy: Policy, *, inner: Inner = "inductor", root: str = "", agree: bool = True) -> None:
        self.__name__ = "policylang"  # what Dynamo calls it in its messages
        setattr(self, marks.COMPILER, True)
        self.policy = policy
        self.inner: Inner = inner
        self.root = root
        self.agree = agree
        self._partitioner = JointPartitioner(policy, deferred=statement_errors.DEFERRED_CODES, root=root)
        self._key = caching.policy_key(policy, root=root)
        self._graphs: list[applied_plans.CompiledGraph] = []
        self._answered = True
        self._known: dict[tuple[int, bool], AgreedAccounts] = {}
        """By code, and whether gradients are computed through it, the graphs that ranks have agreed on."""
        self._born = next(_births)
        self._made_at = time.time_ns() // 1000
        self._left: dict[FrameLeft, None] = {}
        _live.add(self)
        _never_applied[self._born] = policy.name, self._made_at

    def __repr__(self) -> str:
        root = f", root={self.root!r}" if self.root else ""
        return f"policylang.backend({self.policy.name!r}, inner={self.inner!r}{root})"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's. ``mode`` and ``options`` are Inductor's, as in ``torch.compile``. Raises
        ``PolicyError`` subclasses, which ``torch.compile`` passes on as they are."""
        try:
            return self._compile(gm, example_inputs, inductor.inductor_options(self.inner, mode, options))
        except PolicyError as error:
            raise compilers.through_dynamo(error, sys._getframe()) from None

    @property
    def graphs(self) -> tuple[applied_plans.CompiledGraph, ...]:
        """The graphs compiled so far, in order."""
        return tuple(self._graphs)

    @property
    def left(self) -> tuple[FrameLeft, ...]:
        """The code that Dynamo has left uncompiled since the backend was made, for whichever backend."""
        self._left |= dict.fromkeys(compilers.frames_left(self._made_at))
        return tuple(self._left)

    def check(self) -> None:
        """Raise ``PolicyMatchError`` if a rule matched nothing in any of the graphs compiled so far, and
        ``PolicyGraphError`` if there is none. The first is also raised when the first backward starts; call this
        after a forward to know earlier. The second is raised only here: if nothing was compiled, no other code of
        ours runs."""
        if not self._graphs or (self.left and all(graph.kind == "inference" for graph in self._graphs)):
            raise PolicyGraphError([refusals.nothing_decided(checkpointed=False, compiled=True, left=self.left)])
        self._check_matches()

    def _check_matches(self) -> None:
        problems = self._unanswered()
        if problems:
            first, *others = problems
            left = tuple(f"{refusals.of_frame(frame)}: {frame.why}" for frame in self.left)
            raise PolicyMatchError([evolve(first, details=(*first.details, *left)), *others])
        self._answered = True

    def reset(self) -> None:
        """Forget the graphs compiled so far; ``torch._dynamo.reset()`` calls it."""
        self._graphs.clear()
        self._known.clear()
        self._answered = True

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, Any]
    ) -> Callable[..., Any]:
        sessions, block = self._checkpoints(gm)
        partitioner, key, root = self._partitioner, self._key, self.root
        if block is not None:
            partitioner, key, root = self._for_block(block)
        aside = weights_among(example_inputs, root) if block is None else weights_of_blocks(*block.numbered_blocks())
        if aside is not None:
            partitioner, key = evolve(partitioner, aside=aside), f"{key}:{digest_of([repr(aside)])}"
        graph = applied_plans.described(gm, number=len(self._graphs), root=root)
        trained = inductor.needs_gradients(gm, example_inputs)
        known = self._known.setdefault((compilers.code_being_compiled(), trained), [])
        topic = inductor.topic_of("compiling", "a graph", root)
        compare = partial(comparing, topic, self.agree, known=known)
        if self.inner == "inductor":
            compiled = inductor.with_inductor(partitioner, key, gm, example_inputs, settings, compare)
        else:
            compiled = inductor.with_aot_eager(partitioner, gm, example_inputs, compare)
        graph.findings, graph.from_cache = compiled.findings, compiled.from_cache
        graph.sharded_aside, graph.code = aside is not None, compiled.code
        self._graphs.append(graph)
        self._left |= dict.fromkeys(compilers.frames_left(self._made_at))  # torch remembers a few compilations alone
        if graph.kind == "training":
            _never_applied.pop(self._born, None)
        for session in sessions:
            session.graphs.add(graph)
        self._answered = not self._unanswered()
        run = watched(compiled.run, graph, lambda: self._answered, self._check_matches)
        return self._as_called(run, compiled.why_gone, f"{PREFIX}{graph.label}, policy {self.policy.name}")

    def _checkpoints(self, gm: fx.GraphModule) -> tuple[tuple[Session, ...], Session | None]:
        """Take the checkpoints of ours out of a graph. Their sessions, and the one of which the graph is a block.
        Raises ``PolicyMatchError`` where one of them has another policy."""
        sessions, block = take_out(gm)
        around = innermost()
        if around is not None:
            sessions = (*sessions, around.session)
            block = around.session if is_part_of_block(gm, around.session) else None
        for session in sessions:
            session.follow(self.policy)
        return sessions, block

    def _for_block(self, session: Session) -> tuple[JointPartitioner, str, str]:
        """Partitioner, key and root for a separately compiled block of a model. It represents all blocks, since they
        share the compiled graph. Raises ``PolicyMatchError`` if the policy treats them differently."""
        names = session.block_names()
        apart = telling_apart(self.policy, () if self.root else names)
        if apart:
            raise PolicyMatchError(apart)
        known = self.root or next(filter(None, names), "")
        root = known or next((type(module).__name__ for module in session.regions), "block")
        policy = self.policy
        if policy.blocks is None or not known:  # else the blocks would be the largest list of modules in it
            policy = evolve(policy, blocks=Blocks(f"/{root}", span=_NOWHERE))
        partitioner = JointPartitioner(policy, deferred=statement_errors.DEFERRED_CODES, root=root)
        return partitioner, f"{caching.policy_key(policy, root=root)}:block", root

    def _as_called(self, run: Callable[..., Any], why_gone: inductor.WhyGone, named: str) -> Callable[..., Any]:
        """``run``; a checkpoint of ours around it leaves saving to it, and if a collective in it fails because another
        rank has stopped, the error gives that rank's reason. A profile has it as a range."""

        def call(*arguments: Any) -> Any:
            around = innermost()
            if around is not None:
                around.give_way(self.policy)
            try:
                with named_range(named) if is_profiling() else nullcontext():
                    return run(*arguments)
            except RuntimeError as error:
                why = why_gone()
                if why is None:
                    raise
                raise why from error

        return call

    def _unanswered(self) -> tuple[Diagnostic, ...]:
        trained = [graph for graph in self._graphs if graph.kind == "training"]
        found = [(graph.label, found.complaints) for graph in trained for found in graph.findings]
        sharded = any(graph.sharded_aside for graph in self._graphs)
        return statement_errors.shared_by_all(self.policy, found, root=self.root, sharded=sharded)


@atexit.register
def _warn_of_policies_never_applied() -> None:
    """Warn at exit of policies that were never applied: where Dynamo compiles nothing, no code of ours runs before."""
    left = {name: frames[0] for name, made_at in _never_applied.values() if (frames := compilers.frames_left(made_at))}
    if left:
        found = refusals.runs_as_it_is(next(iter(left.values())))
        names = listed([f"`{name}`" for name in left], 3)
        message = f"no graph with gradients was compiled under {names}: {found.message} ({found.code})"
        warnings.warn(f"{message}; {found.help}", PolicyWarning, stacklevel=2)


def policy_around(gm: fx.GraphModule) -> Policy | None:
    """The policy of the first checkpoint of ours in a graph, or of the one that it is compiled in."""
    around = innermost()
    if around is not None:
        return around.session.policy
    graphs = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
    found = (_behind(module, node) for module in graphs for node in module.graph.nodes)
    return next((behind[0].policy for behind in found if behind is not None), None)


def graph_uses_of(subject: object) -> tuple[applied_plans.GraphUse, ...] | None:
    """The graphs compiled for a model, a compiled model or function, or a backend, and the number of its modules that
    run each; None for anything else. A model's graphs are those that were called with one of its parameters, whatever
    was passed to ``torch.compile``; those of its last backend, if it was recompiled. If no graph was called with a
    parameter, a compiled model's are those of its backend, and so are a compiled function's."""
    if isinstance(subject, PolicyBackend):
        return applied_plans.of_backend(subject.graphs)
    if isinstance(subject, fx.GraphModule):
        return None
    its_own = compilers.backend_of(subject)
    if not isinstance(subject, torch.nn.Module):
        return applied_plans.of_backend(its_own.graphs) if isinstance(its_own, PolicyBackend) else None
    if isinstance(its_own, PolicyBackend):
        return applied_plans.of_model([its_own.graphs], subject) or applied_plans.of_backend(its_own.graphs)
    return applied_plans.of_model([one.graphs for one in sorted(_live, key=lambda one: one._born)], subject)


def frames_left_of(subject: object, *, others: bool = False) -> tuple[FrameLeft, ...]:
    """The code that Dynamo left uncompiled: of a backend, all since it was made; of a model, what is its modules' own
    code. ``others``: of a model whose backend is known, all since that was made."""
    backend = subject if isinstance(subject, PolicyBackend) else compilers.backend_of(subject)
    by_name = getattr(backend, marks.COMPILER, False)
    if isinstance(backend, PolicyBackend) and (others or not isinstance(subject, torch.nn.Module)):
        return backend.left
    if not isinstance(subject, torch.nn.Module) or not (by_name or _live):
        return ()
    kinds = {kind for module in subject.modules() for kind in type(module).__mro__}
    methods = [inspect.unwrap(each) for kind in kinds for each in vars(kind).values() if inspect.isfunction(each)]
    own = {(each.__code__.co_filename, each.__code__.co_firstlineno) for each in methods if inspect.isfunction(each)}
    left = compilers.frames_left() if by_name else (frame for one in _live for frame in one.left)
    return tuple(dict.fromkeys(frame for frame in left if (frame.file, frame.line) in own))


def warn_of_recompile_limit(made: PolicyBackend) -> None:
    """Blocks share their code, and Dynamo compiles one piece of code for so many backends and no more."""
    if not made.root:
        return
    roots = {one.root for one in _live if one.root and one.inner == made.inner and one.policy == made.policy}
    limit = compilers.recompile_limit()
    if len(roots) > limit:
        warnings.warn(
            f"{len(roots)} backends differ in `root` alone: if their modules share a forward, torch compiles the first "
            f"{limit} and runs the rest eagerly, without a policy; give one backend to all blocks that are to be "
            "treated alike, or raise `torch._dynamo.config.recompile_limit`",
            PolicyWarning,
            stacklevel=3,
        )
