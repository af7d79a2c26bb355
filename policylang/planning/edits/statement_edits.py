"""Plans the ``fuse``, ``collapse`` and ``bucket`` statements of a policy as graph edits, one after the other.

Rules are planned on the facts of the edited graph. Everything is known beforehand, the names of new nodes included, so
that a plan on a snapshot is the plan on the live graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from attrs import evolve

from policylang.graph.facts import Derivation, Facts, Flag, Group, Ref, found_in, replaced_in, rewritten
from policylang.language.cancellation import check_cancelled
from policylang.language.diagnostics import Diagnostic, diagnose, prefixed
from policylang.language.shown import counted
from policylang.language.syntax import Bucket, Chunk, Policy, Rewriting
from policylang.operators.layouts import MOVERS
from policylang.operators.names import FOLLOWERS, bytes_of
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.buckets import Buckets
from policylang.planning.edits.chunks import Chunks
from policylang.planning.edits.edit_planner import EditPlanner, SelectRows, Setting
from policylang.planning.edits.fusion import GatherChains, ScatterChains
from policylang.planning.edits.layout_chains import unread_pieces, with_pieces, without_pieces
from policylang.planning.edits.other_ranks import ConsensusRound, Ranks
from policylang.planning.edits.proof import Prover
from policylang.planning.edits.round_trips import RoundTrips
from policylang.planning.graph_edit import Edit, Edits, FusedGroup, NewNode, Node, Refusal

_KEPT = Flag.RECORDED_SAVED | Flag.RECORDED_OFFLOADED | Flag.BACKWARD_HOOK
"""Flags that a new node copies from the node whose metadata it has."""
_OF_CALL = Flag.VIEW | Flag.MULTI_OUTPUT | Flag.COMPUTE
_HANDED_ON = Flag.FORWARD_OUTPUT | Flag.GRADIENT  # what the replacement of a value inherits from it


def edited(facts: Facts, edits: Sequence[Edit]) -> Facts:
    """The facts after some edits of one statement. Linear in nodes, edges and new nodes."""
    return _EditedFacts(facts, edits).facts() if edits else facts


class _EditedFacts:
    def __init__(self, facts: Facts, edits: Sequence[Edit]) -> None:
        self.old = facts
        self.edits = edits
        index = facts.index
        gone = {index[name] for edit in edits for name in (*edit.dead, *edit.ahead, *edit.behind)}
        put: dict[int, list[int | NewNode]] = {}
        for edit in edits:
            ahead, behind = ([index[name] for name in names] for names in (edit.ahead, edit.behind))
            put.setdefault(index[edit.before], []).extend((*ahead, *edit.nodes, *behind))
        self.order: list[int | NewNode] = []
        for row in range(len(facts)):
            self.order.extend(put.get(row, ()))
            if row not in gone:
                self.order.append(row)
        names = (facts.names[each] if isinstance(each, int) else each.name for each in self.order)
        self.row_of_name = {name: row for row, name in enumerate(names)}
        replacing = {old: new for edit in edits for old, new in edit.replaced}
        self.row_of = array("l", [-1]) * len(facts)
        for row, name in enumerate(facts.names):
            while name in replacing:  # a replacement may have been replaced in turn
                name = replacing[name]
            self.row_of[row] = self.row_of_name.get(name, -1)
        self.groups = dict(facts.groups)

    def facts(self) -> Facts:
        check_cancelled()
        old, column = self.old, self._column
        inputs = [self._inputs(each) for each in self.order]
        restrided = {old.index[name]: stride for edit in self.edits for name, stride in edit.restrided}
        like = {node.like: old.index[node.like] for edit in self.edits for node in edit.nodes}
        call = {node.call: old.index[node.call] for edit in self.edits for node in edit.nodes if node.call}

        def size(node: NewNode) -> int:
            """The bytes of what a new node returns."""
            if node.call and old.shapes[call[node.call]] is None:
                return old.bytes[call[node.call]] * node.share[0] // node.share[1]
            return prod(node.shape) * bytes_of(node.dtype)

        def single(node: NewNode, value: Any) -> Any:
            """A fact of a node that returns one tensor."""
            return None if node.call and old.shapes[call[node.call]] is None else value

        strides = column(old.strides, lambda node: single(node, node.stride))
        return rewritten(
            old,
            [
                (each, Derivation.SAME) if isinstance(each, int) else (like[each.like], Derivation.NEW)
                for each in self.order
            ],
            names=list(self.row_of_name),
            targets=column(old.targets, lambda node: node.target),
            phases=bytearray(column(old.phases, lambda node: old.phases[like[node.like]])),
            modules=column(old.modules, lambda node: node.module),
            flags=self._flags(inputs),
            bytes=array("q", column(old.bytes, size)),
            numel=array("q", column(old.numel, lambda node: prod(node.shape))),
            shapes=column(old.shapes, lambda node: single(node, node.shape)),
            strides=[
                restrided.get(each, stride) if isinstance(each, int) else stride
                for each, stride in zip(self.order, strides, strict=True)
            ],
            dtypes=column(old.dtypes, lambda node: node.dtype),
            devices=column(old.devices, lambda node: node.device),
            flops=array(
                "q",
                column(
                    old.flops,
                    lambda node: old.flops[call[node.call]] * node.share[0] // node.share[1] if node.call else 0,
                ),
            ),
            uncounted=column(old.uncounted, lambda node: old.uncounted[call[node.call]] if node.call else "")
            if old.uncounted
            else (),
            inputs=inputs,
            owners=self._owners(inputs),
            arguments=[
                self._argument(
                    old.arguments[each]
                    if isinstance(each, int)
                    else MOVERS[each.target].completed(each.arguments)
                    if each.target in MOVERS
                    else each.arguments
                )
                for each in self.order
            ],
            group_names=column(
                old.group_names,
                lambda node: next(
                    (v.label for v in node.arguments if isinstance(v, FusedGroup)),
                    old.group_names[call[node.call]] if node.call else "",
                ),
            ),
            groups=self.groups,
        )

    def _column(self, old: Sequence[Any], new: Callable[[NewNode], Any]) -> list[Any]:
        check_cancelled()
        return [old[each] if isinstance(each, int) else new(each) for each in self.order]

    def _inputs(self, each: int | NewNode) -> tuple[int, ...]:
        if isinstance(each, int):
            return tuple(dict.fromkeys([self.row_of[row] for row in self.old.inputs[each]]))
        return tuple(dict.fromkeys(self.row_of_name[read.name] for read in found_in(each.arguments, Node)))

    def _argument(self, value: Any) -> Any:
        match value:
            case Ref():
                return Ref(self.row_of[value.row])
            case Node():
                return Ref(self.row_of_name[value.name])
            case FusedGroup():
                if value.name is None:
                    self.groups[value.label] = Group(value.label, value.ranks, len(value.ranks), None)
                return value.label
        return tuple([self._argument(part) for part in value]) if isinstance(value, tuple) else value

    def _owners(self, inputs: Sequence[tuple[int, ...]]) -> array[int]:
        owners = array("i", range(len(self.order)))
        for row, each in enumerate(self.order):
            if isinstance(each, int):
                owners[row] = self.row_of[self.old.owners[each]]
            elif each.target in FOLLOWERS:
                owners[row] = owners[inputs[row][0]]
        return owners

    def _flags(self, inputs: Sequence[tuple[int, ...]]) -> list[int]:
        old = self.old
        flags = self._column(old.flags, lambda node: old.flags[old.index[node.like]] & _KEPT)
        for row, each in enumerate(self.order):
            if isinstance(each, NewNode):
                of_call = old.flags[old.index[each.call]] & _OF_CALL if each.call else 0
                flags[row] |= MOVERS[each.target].categories if each.target in MOVERS else of_call
        for edit in self.edits:
            for was, now in edit.replaced:
                if now in self.row_of_name:  # unless a later edit removes it, with all that reads it
                    flags[self.row_of_name[now]] |= old.flags[old.index[was]] & _HANDED_ON
        for row in self._reading_mutated(inputs):
            flags[row] |= Flag.READS_MUTATED
        return flags

    def _reading_mutated(self, inputs: Sequence[tuple[int, ...]]) -> Iterator[int]:
        """The new nodes that read memory which is written later, as the nodes did that go."""
        old, index = self.old, self.old.index
        mutated: set[int] = set()
        for edit in self.edits:
            sources = {index[name] for name in edit.sources if name in index}
            dead = [index[name] for name in edit.dead]
            reading = [old.inputs[row] for row in dead if old.flags[row] & Flag.READS_MUTATED]
            mutated.update(self.row_of[read[0]] for read in reading if len(read) == 1 and read[0] in sources)
        for row, each in enumerate(self.order) if mutated else ():
            if isinstance(each, NewNode) and not mutated.isdisjoint(inputs[row]):
                yield row
                if each.target in MOVERS and MOVERS[each.target].categories & Flag.VIEW:
                    mutated.add(row)


_PLANNERS: tuple[type[EditPlanner[Any]], ...] = (GatherChains, ScatterChains, RoundTrips, Chunks, Buckets)
EDIT_KINDS: Mapping[str, type[EditPlanner[Any]]] = {each.kind: each for each in _PLANNERS}
_MOST_NAMES = 8


def plan_edits(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    ranks: Ranks | None = None,
    select: SelectRows | None = None,
    held: Collection[str] = (),
) -> tuple[Edits, Facts]:
    """The edits of a graph, and its facts once they are made. Linear in nodes and edges for each statement.

    With ``select``, which evaluates selectors once values are decided, only buckets are planned; without it, all other
    kinds. ``held``: nodes that no collective crosses. Without ``ranks``, edits that depend on others are not made.
    """
    planned = any((select is not None) is isinstance(each, Bucket) for each in policy.rewrites)
    if not planned or not capabilities.rewrites:
        return Edits(), facts
    numbers = [int(part) for part in facts.torch_version.split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and numbers < [2, 12]:
        # torch sorts the ranks of process groups before 2.12; the graph's, so that a snapshot gives the graph's plan.
        capabilities = evolve(capabilities, unsorted_groups=False)
    prover, glob = Prover(), None if policy.blocks is None else policy.blocks.glob
    rejected: dict[str, str] = {}
    while True:
        consensus = ConsensusRound(ranks is not None, rejected)
        setting = Setting(facts, 0, capabilities, {}, prover, facts.groups, consensus, select, glob, held)
        found = _attempt(policy, setting)
        unshared = ranks.unshared(consensus.proposals) if ranks is not None else {}
        if not unshared:
            return found
        rejected = {**rejected, **unshared}


def edit_diagnostics(policy: Policy, edits: Edits, before: Facts, capabilities: Capabilities) -> list[Diagnostic]:
    """Statements that the path cannot apply, that find nothing, or all of whose candidates were refused."""
    if not capabilities.rewrites:
        asked = [statement for statement in policy.rewrites if not isinstance(statement, Bucket)]
        return [refusals.cannot_edit(statement, capabilities) for statement in asked]
    found: list[Diagnostic] = []
    for number, statement in enumerate(policy.rewrites):
        if isinstance(statement, Bucket):  # the order's own
            continue
        mine = edits.of(number)
        if not mine.done and not statement.optional:
            is_error = isinstance(statement, Chunk) or not mine.refused
            why = _nothing(statement, before, mine.refused) if is_error else all_refused(statement, mine.refused)
            found.append(why)
    return found


# --- planning ---


def _attempt(policy: Policy, start: Setting) -> tuple[Edits, Facts]:
    """The edits that this rank would make but for what is rejected, each statement on what those before it leave."""
    done: list[Edit] = []
    refused: list[Refusal] = []
    facts = start.facts
    for number, statement in enumerate(policy.rewrites):
        if (start.select is not None) is not isinstance(statement, Bucket):
            continue
        check_cancelled()
        unread = unread_pieces(facts)
        setting = evolve(start, facts=without_pieces(facts, unread), number=number, name_counts={})
        found = []
        for outcome in EDIT_KINDS[statement.kind](statement, setting).outcomes():
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            else:
                found.append(with_pieces(outcome, facts, unread))
        mine = _chained(found)
        facts = edited(facts, mine)
        done.extend(mine)
    return Edits(tuple(done), tuple(refused)), facts


def _chained(found: Sequence[Edit]) -> list[Edit]:
    """With the sources of each edit renamed as the edits before it leave them."""
    replaced: dict[str, str] = {}
    result = []

    def renamed(node: Node) -> Node:
        return Node(replaced.get(node.name, node.name))

    for edit in found:
        sources = tuple(replaced.get(source, source) for source in edit.sources)
        if sources != edit.sources:
            nodes = tuple(evolve(each, arguments=replaced_in(each.arguments, Node, renamed)) for each in edit.nodes)
            edit = evolve(edit, sources=sources, nodes=nodes)
        replaced.update(edit.replaced)
        result.append(edit)
    return result


# --- what is wrong ---


def _nothing(statement: Rewriting, before: Facts, refused: Sequence[Refusal]) -> Diagnostic:
    text, kind = _text(statement), EDIT_KINDS[statement.kind]
    nodes = counted(sum(f".{kind.counted}_" in target for target in before.targets), "node")
    there = (f"{kind.counted}: {nodes}",) if kind.counted else ()
    message = f"`{text}` finds nothing to {'cut' if isinstance(statement, Chunk) else 'rewrite'} in this graph"
    help = f"if that is intended, write `optional {text}`"
    if refused:
        message, help = f"`{text}` cuts nothing: {refused[0].reason}", f"cut less, or another module; {help}"
    details = _reasons(refused) if refused else (*there, kind.nothing_in(statement))
    fixes = [prefixed(statement.span, "optional")]
    return diagnose(refusals.NOTHING_TO_REWRITE, message, span=statement.span, help=help, details=details, fixes=fixes)


def all_refused(statement: Rewriting, refused: Sequence[Refusal]) -> Diagnostic:
    """A statement that changes nothing; each of its candidates has a reason."""
    text, count = _text(statement), len(refused)
    all_of_them = "its one candidate is" if count == 1 else f"all of its {count} candidates are"
    message = f"`{text}` changes nothing: {all_of_them} refused"
    help = f"where that is as it should be, write `optional {text}`"
    details = _reasons(refused)
    fixes = [prefixed(statement.span, "optional")]
    return diagnose(refusals.REWRITES_REFUSED, message, span=statement.span, help=help, details=details, fixes=fixes)


def _reasons(refused: Sequence[Refusal]) -> tuple[str, ...]:
    listed = [f"{' → '.join(each.collectives)}: {each.reason}" for each in refused]
    return (*listed[:_MOST_NAMES], *([f"and {len(listed) - _MOST_NAMES} more"] if len(listed) > _MOST_NAMES else ()))


def _text(statement: Rewriting) -> str:
    return statement.span.one_line.removeprefix("optional ")
