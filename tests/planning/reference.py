"""A slow planner, written from the sentences of the language reference, to hold the fast one against.

It shares nothing with policylang.planning but the data that goes in: sets of rows, nodes × rules, fixed points by
repetition. Every helper is written again here in the plainest way, globs, chains and blocks included.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from policylang.graph.facts import Facts, Flag, InputKind, Phase
from policylang.language import syntax as s
from policylang.language.selectors import walk
from policylang.language.syntax import Action

INPUTS = {"parameter": InputKind.PARAMETER, "buffer": InputKind.BUFFER, "input": InputKind.USER}

SPLITS = ("aten.split.Tensor",)
JOINS = ("aten.cat.default",)
CHOICES = ("aten.topk", "aten.argmax", "aten.sort", "aten.argsort", "aten.max")
ORDERS = ("aten.sort", "aten.argsort")
STEERED = ("aten.index", "aten.gather", "aten.scatter", "aten.index_add", "aten.embedding", "aten.where")


# --- globs ---------------------------------------------------------------------------------------------------------
def name_matches(pattern: str, name: str) -> bool:
    """``*`` is any run of characters, ``{a,b}`` either."""
    if pattern.startswith("{"):
        choices, rest = pattern[1:].split("}", 1)
        return any(name_matches(choice.strip() + rest, name) for choice in choices.split(","))
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(name_matches(pattern[1:], name[cut:]) for cut in range(len(name) + 1))
    return bool(name) and pattern[0] == name[0] and name_matches(pattern[1:], name[1:])


def components_match(patterns: list[str], components: list[str]) -> bool:
    """Whole components at a time; ``**`` is any number of them, at the end of a glob at least one."""
    if not patterns:
        return not components
    if patterns[0] == "**":
        fewest = 1 if len(patterns) == 1 else 0
        return any(components_match(patterns[1:], components[cut:]) for cut in range(fewest, len(components) + 1))
    if not components:
        return False
    return component_matches(patterns[0], components[0]) and components_match(patterns[1:], components[1:])


def component_matches(pattern: str, component: str) -> bool:
    if found := re.fullmatch(r"\[(\d)-(\d)\]", pattern):
        return len(component) == 1 and found[1] <= component <= found[2]
    return name_matches(pattern, component)


def path_matches(glob: str, path: str) -> bool:
    """The whole path, or, unless the glob starts with ``/``, what is left of it after some leading components."""
    components = path.split(".") if path else []
    starts = [0] if glob.startswith("/") else range(len(components))
    patterns = glob.lstrip("/").split(".")
    return any(components_match(patterns, components[start:]) for start in starts)


def outermost(glob: str, path: str) -> str | None:
    components = path.split(".") if path else []
    for depth in range(1, len(components) + 1):
        if path_matches(glob, ".".join(components[:depth])):
            return ".".join(components[:depth])
    return None


def compares(value: float, op: str, limit: float) -> bool:
    order = "<" if value < limit else ">" if value > limit else "="
    return order in {"==": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}[op]


# --- blocks --------------------------------------------------------------------------------------------------------
def block_names(policy: s.Policy, facts: Facts) -> list[str | None]:
    """For each row the name of its block. The graphs of the tests have one ModuleList at most, ``layers``."""
    names: list[str | None] = []
    by_region = policy.blocks is None and any(region is not None for region in facts.ac_regions)
    for row in range(len(facts)):
        path = facts.modules[row] or facts.modules[facts.owners[row]]
        if by_region:
            region = facts.ac_regions[row]
            if region is None:
                region = facts.ac_regions[facts.owners[row]]
            names.append(None if region is None or row not in forward(facts) else f"region {region}")
        else:
            names.append(outermost("/layers.*" if policy.blocks is None else policy.blocks.glob, path))
    return names


def numbered(facts: Facts, names: list[str | None]) -> list[int]:
    """Blocks are numbered in the order in which the forward reaches them, then the rest of the graph."""
    order: list[str] = []
    for row in [*sorted(forward(facts)), *range(len(facts))]:
        name = names[row]
        if name is not None and name not in order:
            order.append(name)
    return [-1 if name is None else order.index(name) for name in names]


# --- selectors -----------------------------------------------------------------------------------------------------
def forward(facts: Facts) -> set[int]:
    calls = (row for row, op in enumerate(facts.ops) if op == "call_function")
    return {row for row in calls if facts.phases[row] == Phase.FORWARD}


class Reference:
    def __init__(self, policy: s.Policy, facts: Facts, seconds: Sequence[float] = ()) -> None:
        self.policy = policy
        self.seconds = seconds
        self.facts = facts
        self.forward = forward(facts)
        self.block = numbered(facts, block_names(policy, facts))
        self.block_count = max(self.block, default=-1) + 1
        self.next, self.previous = self.links()

    def nodes(self, selector: s.Selector) -> set[int]:
        match selector:
            case s.Everything():
                return set(self.forward)
            case s.Operator():
                return {row for row in self.forward if self.calls(row, selector)}
            case s.Reference(name=name):
                return self.nodes(self.policy.lets[name].selector)
            case s.InModule():
                inside = {r for r in self.forward if outermost(selector.glob, self.facts.modules[r])}
                return self.nodes(selector.selector) & (self.forward - inside if selector.outside else inside)
            case s.InBlock():
                inside = {r for r in self.forward if self.in_blocks(self.block[r], selector.which)}
                return self.nodes(selector.selector) & (self.forward - inside if selector.outside else inside)
            case s.Ordinal():
                return self.by_position(selector)
            case s.Where():
                return {row for row in self.nodes(selector.selector) if self.holds(row, selector.predicate)}
            case s.Union():
                return set().union(*(self.nodes(part) for part in selector.parts))
            case s.Intersection():
                return self.nodes(selector.left) & self.nodes(selector.right)
            case s.Difference():
                return self.nodes(selector.left) - self.nodes(selector.right)
            case s.Feeding(reverse=False):
                read = {source for row in self.nodes(selector.right) for source in self.facts.inputs[row]}
                return self.nodes(selector.left) & read
            case s.Feeding():
                right = self.nodes(selector.right)
                return {row for row in self.nodes(selector.left) if right & set(self.facts.inputs[row])}
            case s.Step(direction="users"):
                of = self.nodes(selector.selector)
                return {row for row in self.forward if of & set(self.facts.inputs[row])}
            case s.Step():
                return {r for row in self.nodes(selector.selector) for r in self.facts.inputs[row]} & self.forward
            case s.Chain():
                return self.chain(selector)
            case s.ChainOf():
                return self.chain_of(selector)
        raise AssertionError(selector)

    def calls(self, row: int, operator: s.Operator) -> bool:
        parts = self.facts.targets[row].split(".")
        namespace, name, overload = parts[0], parts[1], ".".join(parts[2:])
        in_own_memory = self.facts.flags[row] & Flag.WRITES and self.facts.flags[row] & Flag.REPEATABLE
        functional = name[:-1] if name.endswith("_") and in_own_memory else name
        return (
            (name_matches(operator.name, name) or name_matches(operator.name, functional))
            and name_matches(operator.namespace or ("*" if namespace != "builtin" else "tensor operators"), namespace)
            and (operator.overload is None or name_matches(operator.overload, overload))
        )

    def in_blocks(self, block: int, which: s.BlockSet) -> bool:
        if block < 0:
            return False
        if which.kind == "every":
            return block + 1 in range(which.start, self.block_count + 1, which.n)
        n = which.n
        if which.share is not None:  # as many whole blocks as the share has room for
            n = max(n for n in range(self.block_count + 1) if n <= which.share * self.block_count)
        return {
            "any": True,
            "first": block < n,
            "last": block >= self.block_count - n,
            "range": which.low <= block <= which.high,
        }[which.kind]

    def by_position(self, ordinal: s.Ordinal) -> set[int]:
        scope = ordinal.scope or (s.Scope.BLOCK if self.block_count else s.Scope.GRAPH)
        groups: dict[object, list[int]] = {}
        for row in sorted(self.nodes(ordinal.selector)):
            if scope is s.Scope.BLOCK and self.block[row] < 0:
                continue
            key = {
                s.Scope.BLOCK: self.block[row],
                s.Scope.MODULE: self.facts.modules[row],
                s.Scope.CHAIN: tuple(self.whole_line(row)),
                s.Scope.GRAPH: None,
            }[scope]
            groups.setdefault(key, []).append(row)
        chosen: set[int] = set()
        for group in groups.values():
            if ordinal.kind == "first":
                chosen |= set(group[: ordinal.n])
            elif ordinal.kind == "last":
                chosen |= set(group[-ordinal.n :])
            elif ordinal.kind == "nth":
                chosen |= set(group[ordinal.n - 1 : ordinal.n])
            else:
                chosen |= set(group[(ordinal.start or ordinal.n) - 1 :: ordinal.n])
        return chosen

    # --- chains ---

    def data_inputs(self, row: int) -> list[int]:
        return [source for source in self.facts.inputs[row] if not self.facts.flags[source] & Flag.SYMBOLIC]

    def users(self, row: int) -> list[int]:
        return [user for user in sorted(self.forward) if row in self.facts.inputs[user]]

    def fan_outs(self) -> list[list[int]]:
        lines = []
        for split in sorted(self.forward):
            if self.facts.targets[split] not in SPLITS:
                continue
            pieces = self.users(split)
            joins = {user for piece in pieces for user in self.users(piece)}
            if (
                len(joins) == 1
                and all(self.facts.targets[piece] == "builtin.getitem" for piece in pieces)
                and self.facts.targets[min(joins)] in JOINS
                and set(self.data_inputs(min(joins))) == set(pieces)
            ):
                lines.append([split, *pieces, min(joins)])
        return lines

    def links(self) -> tuple[dict[int, int], dict[int, int]]:
        following: dict[int, int] = {}
        preceding: dict[int, int] = {}
        for row in self.forward:
            users = self.users(row)
            if len(users) == 1 and self.data_inputs(users[0]) == [row]:
                following[row] = users[0]
            inputs = self.data_inputs(row)
            if len(inputs) == 1 and inputs[0] in self.forward:
                preceding[row] = inputs[0]
        for line in self.fan_outs():
            for here, there in pairwise(line):
                following[here] = there
                preceding[there] = here
        return following, preceding

    def line(self, row: int, links: dict[int, int]) -> list[int]:
        """What follows a row along the links, itself left out."""
        found = []
        while row in links:
            row = links[row]
            found.append(row)
        return found

    def whole_line(self, row: int) -> list[int]:
        """The forward rows on one straight line with a row: those it reaches, and those that reach it."""
        return [there for there in sorted(self.forward) if row in self.onward(there) or there in self.onward(row)]

    def onward(self, row: int) -> list[int]:
        return [row, *self.line(row, self.next)]

    def chain(self, chain: s.Chain) -> set[int]:
        rows = self.nodes(chain.selector)
        after = {there for row in rows for there in self.line(row, self.next)}
        before = {there for row in rows for there in self.line(row, self.previous)}
        return {"after": after, "before": before, "through": before | rows | after}[chain.direction]

    def chain_of(self, chain: s.ChainOf) -> set[int]:
        found: set[int] = set()
        markers = set() if chain.marker is None else self.nodes(chain.marker)
        for row in self.nodes(chain.selector):
            line = [row, *self.line(row, self.next)]
            cut = next((position for position, there in enumerate(line) if there in markers), None)
            if chain.cut is None:
                found |= set(line)
            elif cut is not None:
                found |= set(line[cut + 1 :] if chain.cut == "after" else line[:cut])
        return found

    # --- predicates ---

    def holds(self, row: int, predicate: s.Predicate) -> bool:
        match predicate:
            case s.And(parts=parts):
                return all(self.holds(row, part) for part in parts)
            case s.Or(parts=parts):
                return any(self.holds(row, part) for part in parts)
            case s.Not():
                return not self.holds(row, predicate.predicate)
            case s.Compare():
                value = self.quantity(row, predicate)
                return value is not None and compares(value, predicate.op, predicate.value.value)
            case s.Match():
                return self.matches(row, predicate)
            case s.CrossesCut():
                return row in self.crossing(predicate.size.value)
            case s.Annotated(name=name):
                return any(name in self.facts.annotations[node] for node in (row, self.facts.owners[row]))
            case s.Is(name=name):
                return self.is_so(row, name)
        raise AssertionError(predicate)

    def quantity(self, row: int, compare: s.Compare) -> float | None:
        shape = self.facts.shapes[row]
        match compare.quantity:
            case "bytes" | "numel" | "flops" as column:
                return getattr(self.facts, column)[row]
            case "ndim":
                return None if shape is None else len(shape)
            case "shape":
                try:
                    return None if shape is None else shape[compare.index]
                except IndexError:
                    return None
            case "users":
                return len(self.users(row))
            case "inputs":
                return len(self.facts.inputs[row])
            case "group_size":
                name = self.facts.group_names[self.facts.owners[row]]
                return self.facts.groups[name].size if name else None
            case "time" | "time_per_gib" if not self.seconds:
                return None
            case "time":
                return self.seconds[self.facts.owners[row]]
            case "time_per_gib":
                whole = self.facts.owners[row]
                looks = self.facts.flags[whole] & Flag.VIEW
                return (
                    None
                    if looks or not self.facts.bytes[whole]
                    else self.seconds[whole] * 2**30 / self.facts.bytes[whole]
                )
        raise AssertionError(compare)

    def matches(self, row: int, match: s.Match) -> bool:
        wanted = match.op == "=="
        if match.property == "module":
            return path_matches(match.pattern, self.facts.modules[row]) == wanted
        if match.property == "overload":
            value = ".".join(self.facts.targets[row].split(".")[2:])
            return bool(value) and name_matches(match.pattern, value) == wanted
        if match.property == "dtype":
            value = self.facts.dtypes[row]
            return bool(value) and name_matches(match.pattern, value) == wanted
        value = self.facts.devices[row]
        kind = value.split(":")[0]
        return bool(value) and (name_matches(match.pattern, value) or name_matches(match.pattern, kind)) == wanted

    def is_so(self, row: int, name: str) -> bool:
        flags = self.facts.flags[row]
        match name:
            case "from parameter" | "from buffer" | "from input":
                return self.made_of(row, INPUTS[name.split()[1]])
            case "gathered parameter" | "gathered buffer" | "gathered input":
                return self.made_of(row, INPUTS[name.split()[1]]) and self.gathered(row)
            case "crosses block":
                return any(self.block[user] != self.block[row] for user in self.users(row))
            case "user tagged":
                return self.facts.user_tags[row] is not None or self.facts.user_tags[self.facts.owners[row]] is not None
            case "is mutated":
                touches = flags & Flag.WRITES or flags & Flag.READS_MUTATED
                return bool(touches) and not flags & Flag.REPEATABLE
            case "is view":
                piece = self.facts.targets[row] == "builtin.getitem"
                return bool((self.facts.flags[self.facts.inputs[row][0]] if piece else flags) & Flag.VIEW)
            case "is random":
                return bool(flags & Flag.RANDOM)
            case "is multi_output":
                return bool(flags & Flag.MULTI_OUTPUT)
            case "feeds backward":
                return bool(flags & Flag.FEEDS_BACKWARD)
            case "recorded saved":
                return bool(flags & Flag.RECORDED_SAVED)
            case "recorded offloaded":
                return bool(flags & Flag.RECORDED_OFFLOADED)
        raise AssertionError(name)

    def made_of(self, row: int, kind: InputKind) -> bool:
        if row not in self.forward:
            return self.facts.input_kinds[row] == kind
        for line in self.fan_outs():
            if row == line[-1]:
                return self.made_of(line[0], kind)
        inputs = self.data_inputs(row)
        return len(inputs) == 1 and self.made_of(inputs[0], kind)

    def gathered(self, row: int) -> bool:
        """Whether a row that is made of one parameter is a gather or made of one."""
        return row in self.forward and (
            "all_gather" in self.facts.targets[row] or any(map(self.gathered, self.data_inputs(row)))
        )

    # --- cuts ---

    @cache  # noqa: B019, it is asked for every row
    def crossing(self, size: float) -> set[int]:
        """The nodes whose decision saves a value that is alive at a cut, with the owners of those decisions."""
        order, made_at = sorted(self.forward), self.values()
        alive = {value for place in self.cuts(size) for value in self.alive(order, made_at, place)}
        owners = self.facts.owners
        rows = {row for row in order if self.memory(row) in alive and owners[row] == owners[self.memory(row)]}
        return rows | {owners[row] for row in rows}

    def cuts(self, size: float) -> list[int]:
        """By the number of forward nodes before each."""
        order, made_at = sorted(self.forward), self.values()
        end = len(order)

        def made(low: int, high: int) -> int:
            return sum(self.facts.bytes[value] for value, place in made_at.items() if low <= place < high)

        def bytes_alive(place: int) -> int:
            return sum(self.facts.bytes[value] for value in self.alive(order, made_at, place))

        cuts, start = [], 0
        while made(start, end) > size:
            places = [place for place in range(start + 1, end) if size / 2 <= made(start, place) <= size]
            if not places:
                too_much = min(made(start, place) for place in range(start, end + 1) if made(start, place) > size)
                if too_much == made(start, end):
                    break
                places = [place for place in range(start + 1, end) if made(start, place) == too_much]
            least = min(map(bytes_alive, places))
            start = max(place for place in places if bytes_alive(place) == least)
            cuts.append(start)
        return cuts

    def values(self) -> dict[int, int]:
        """Every row that allocates memory to the number of forward nodes before the one that makes it."""
        facts, order = self.facts, sorted(self.forward)
        rows = [row for row in order if self.memory(row) == row and not facts.flags[row] & Flag.SYMBOLIC]
        rows = [row for row in rows if not self.made_of(row, InputKind.PARAMETER)]
        taken_apart = {facts.inputs[row][0] for row in rows if facts.targets[row] == "builtin.getitem"}
        made_at = {}
        for value in rows:
            maker = value
            while facts.targets[maker] == "builtin.getitem":
                maker = facts.inputs[maker][0]
            if value not in taken_apart:
                made_at[value] = order.index(maker)
        return made_at

    def alive(self, order: list[int], made_at: dict[int, int], place: int) -> set[int]:
        read = {self.memory(source) for row in order[place:] for source in self.facts.inputs[row]}
        return {value for value in read if value in made_at and made_at[value] < place}

    def memory(self, row: int) -> int:
        """The row that allocated what a row lives in."""
        facts = self.facts
        flags, owner = facts.flags[row], facts.owners[row]
        if facts.targets[row] == "builtin.getitem" and owner != row:
            return self.memory(owner) if facts.flags[owner] & Flag.VIEW else row
        if owner != row and not flags & Flag.REPEATABLE:
            return self.memory(owner)
        unsaid = facts.targets[row] == "aten._unsafe_view.default"
        looks = unsaid or flags & Flag.VIEW or (owner != row and flags & Flag.WRITES)
        return self.memory(facts.inputs[row][0]) if looks and facts.inputs[row] else row

    # --- the plan ---

    def matched(self, rule: s.Rule) -> set[int]:
        """The owners whose decision a rule is about."""
        return {self.facts.owners[row] for row in self.nodes(rule.selector)}

    def group(self, owner: int) -> list[int]:
        return [row for row in range(len(self.facts)) if self.facts.owners[row] == owner]

    def user_actions(self) -> dict[int, Action]:
        """Owner to what the user's checkpoint says, the border between two regions saved."""
        facts = self.facts
        said: dict[int, Action] = {}
        for owner in {facts.owners[row] for row in self.forward}:
            tags = [facts.user_tags[row] for row in self.group(owner) if facts.user_tags[row] is not None]
            if tags:
                said[owner] = Action(tags[0])
        recompute = {owner for owner, action in said.items() if action.recomputes}
        border = set()
        for row in self.forward:
            for source in facts.inputs[row]:
                here, there = facts.ac_regions[source], facts.ac_regions[row]
                if (
                    facts.owners[source] in recompute
                    and facts.owners[row] in recompute
                    and here is not None
                    and there is not None
                    and there > here
                ):
                    border.add(facts.owners[source])
        return {owner: Action.SAVE if owner in border else action for owner, action in said.items()}

    def decisions(self, replays_random: bool) -> dict[int, tuple[Action | None, int | None, str]]:
        """Row to action, rule and why, for every forward row."""
        user = self.user_actions()
        fate = self.policy.undecided.fate if self.policy.undecided else "auto"
        rest = {"auto": None, "save": Action.SAVE, "recompute": Action.RECOMPUTE}[fate]
        sets = [self.matched(rule) for rule in self.policy.rules]
        decided: dict[int, tuple[Action | None, int | None, str]] = {}
        for row in sorted(self.forward):
            owner = self.facts.owners[row]
            decided[row] = (user[owner], None, "user") if owner in user else (rest, None, "undecided")
            for index, rule in enumerate(self.policy.rules):
                if owner in sets[index] and (rule.override or owner not in user):
                    action = None if rule.action is Action.LEAVE else rule.action
                    decided[row] = (action, index, "rule")
            if self.facts.flags[row] & (Flag.SYMBOLIC | Flag.SEED):
                decided[row] = (Action.SAVE, None, "always")
        for owner in self.routing():
            action, index, why = decided[owner]
            if action is None or not action.recomputes or why == "user":
                continue
            if index is None or not self.names_a_choice(self.policy.rules[index].selector, owner):
                for member in self.group(owner):
                    if decided[member][2] != "always":
                        decided[member] = (Action.SAVE, index, "routing")
        return self.made_safe(decided, replays_random)

    def routing(self) -> set[int]:
        """The owners of choices by which an operator goes, through whole numbers alone."""
        facts = self.facts
        return {
            facts.owners[row]
            for row in self.forward
            if self.operator(row) in CHOICES
            and not (self.operator(row) in ORDERS and all(map(self.is_exact, facts.inputs[row])))
            and self.is_whole(row)
            and self.steers(row)
        }

    def operator(self, row: int) -> str:
        return self.facts.targets[row].rpartition(".")[0]

    def is_whole(self, row: int) -> bool:
        return self.facts.dtypes[row] in ("", "int64", "bool")

    def is_exact(self, row: int) -> bool:
        """A whole number that is given, chosen, or computed of such numbers alone."""
        known = row not in self.forward or self.operator(row) in CHOICES
        return self.is_whole(row) and (known or all(map(self.is_exact, self.facts.inputs[row])))

    def steers(self, row: int) -> bool:
        for user in set(self.facts.users[row]) & self.forward:
            if self.operator(user) in STEERED or (self.carries_on(user) and self.steers(user)):
                return True
        return False

    def carries_on(self, row: int) -> bool:
        """Whether a choice that it reads is told in its own result."""
        return self.is_whole(row) and (self.facts.dtypes[row] != "" or self.operator(row) in CHOICES)

    def names_a_choice(self, selector: s.Selector, owner: int) -> bool:
        named = [part for part in walk(selector) if isinstance(part, s.Operator) and "*" not in part.name]
        choices = [row for row in self.group(owner) if self.operator(row) in CHOICES]
        return any(self.calls(row, part) for row in choices for part in named)

    def made_safe(self, decided, replays_random: bool):
        """What cannot be recomputed, and may be saved instead, is: one group at a time, the last needed one first."""
        while True:
            certain, possible = self.needed(decided)
            for row in sorted(certain | possible, reverse=True):
                if row in decided and self.may_be_softened(row, decided, replays_random):
                    for member in self.group(self.facts.owners[row]):
                        if not self.facts.flags[member] & Flag.SYMBOLIC:
                            decided[member] = (Action.SAVE, decided[member][1], "unsafe")
                    break
            else:
                return decided

    def may_be_softened(self, row: int, decided, replays_random: bool) -> bool:
        action, rule, why = decided[row]
        if action is None or not action.recomputes or not self.is_unsafe(row, replays_random):
            return False
        return why == "user" or (rule is not None and self.policy.rules[rule].optional)

    def is_unsafe(self, row: int, replays_random: bool) -> bool:
        flags = 0
        for member in self.group(self.facts.owners[row]):
            flags |= self.facts.flags[member]
        writes = flags & Flag.WRITES and not flags & Flag.REPEATABLE
        draws = flags & Flag.RANDOM and not replays_random
        return bool(writes or flags & (Flag.EFFECTFUL | Flag.READS_MUTATED) or draws)

    def refused(self, decided, replays_random: bool) -> set[int]:
        """The owners whose recomputation is an error."""
        certain, possible = self.needed(decided)
        return {
            self.facts.owners[row]
            for row in (certain | possible) & set(decided)
            if (action := decided[row][0]) is not None and action.recomputes and self.is_unsafe(row, replays_random)
        }

    def needed(self, decided) -> tuple[set[int], set[int]]:
        """The rows that the backward needs for sure, and those that it may need besides."""
        facts = self.facts
        values = {row for row in range(len(facts)) if facts.phases[row] in (Phase.FORWARD, Phase.INPUT)}
        values -= {row for row in values if facts.input_kinds[row] == InputKind.TANGENT}
        certain: set[int] = set()
        for row in range(len(facts)):
            if facts.phases[row] == Phase.BACKWARD:
                certain |= set(facts.inputs[row]) & values
        certain = self.closed(certain, lambda row: self.recomputes(decided, row))
        left = {row for row, (action, _, _) in decided.items() if action is None}
        reach = self.closed(set(certain), lambda row: row in left or self.recomputes(decided, row))
        return certain, reach - certain

    def recomputes(self, decided, row: int) -> bool:
        return row in decided and decided[row][0] is not None and decided[row][0].recomputes

    def closed(self, rows: set[int], goes_on) -> set[int]:
        while True:
            more = {source for row in rows if goes_on(row) for source in self.facts.inputs[row]} - rows
            if not more:
                return rows
            rows |= more
