"""Inlines checkpoints of ours in the graphs that Dynamo hands to our compiler, since the policy cuts those graphs.

Dynamo makes of a checkpoint one operator, whose first argument is a graph of its own and carries the ``context_fn``. In
the place of that operator we put what the graph computes, before anything is planned. What is compiled then is what
would be compiled of the same model without its checkpoints, and nothing is recomputed but by the policy.

Only those of ours: a user's other checkpoints keep what they say.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from policylang.backends.eager.session import Session, session_behind
from policylang.graph.inputs import attribute, normalise, raw_path
from policylang.torch_compat.eager import compiled_around

_THROUGH_FORWARD = re.compile(r"(\.forward)+\.__self__")
"""How Dynamo names a module that it reaches through our stand-in for its ``forward``: ``layers.0.forward.__self__``."""


def take_out(gm: fx.GraphModule) -> tuple[tuple[Session, ...], Session | None]:
    """Put the content of each checkpoint of ours in its place, also where checkpoints lie in one another.

    Returns the sessions that the checkpoints belonged to; and, where the graph was one checkpoint and nothing beside
    it, the session of whose model it is a block, compiled on its own.
    """
    found: dict[Session, None] = {}
    alone = _alone(gm)
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for module in graphs:
        inside = list(_take_out_of(module))
        if inside:
            found.update(dict.fromkeys(inside))
            module.delete_all_unused_submodules()
            module.recompile()
    if found:
        for node in (node for module in graphs for node in module.graph.nodes):
            if stack := node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = {key: _straight_entry(entry) for key, entry in stack.items()}
    return tuple(found), alone


def first_session(gm: fx.GraphModule) -> Session | None:
    """Of the first checkpoint of ours in a graph, which is left as it is."""
    graphs = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
    return next(
        (found[0] for module in graphs for node in module.graph.nodes if (found := _behind(module, node))), None
    )


def _take_out_of(module: fx.GraphModule) -> Iterator[Session]:
    pending = list(module.graph.nodes)
    while pending:
        node = pending.pop()
        found = _behind(module, node)
        if found is not None:
            session, body = found
            yield session
            pending += _inline(module, node, body)


def _behind(module: fx.GraphModule, node: fx.Node) -> tuple[Session, fx.GraphModule] | None:
    """The session and the graph of a checkpoint of ours; None for any other node."""
    kind, context = compiled_around()
    if node.op != "call_function" or node.target is not kind or not node.args:
        return None
    holder = node.args[0]
    body = attribute(module, str(holder.target)) if isinstance(holder, fx.Node) and holder.op == "get_attr" else None
    session = session_behind(body.meta.get(context)) if isinstance(body, fx.GraphModule) else None
    return None if session is None else (session, body)


def _alone(gm: fx.GraphModule) -> Session | None:
    """The session of a graph that is one of its blocks: one checkpoint, in which no path leads to a block."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_") and node.target is not operator.getitem]
    found = _behind(gm, calls[0]) if len(calls) == 1 else None
    return found[0] if found is not None and is_part_of_block(found[1], found[0]) else None


def is_part_of_block(gm: fx.GraphModule, session: Session) -> bool:
    """Whether no module path of a graph leads to a block: then it starts inside one."""
    paths = {normalise(_straight(raw_path(node.meta)))[1] for node in gm.graph.nodes}
    names = [name for name in session.block_names() if name]
    return not any(path == name or path.startswith(f"{name}.") for path in paths for name in names)


def _inline(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """The nodes that came in the place of a checkpoint."""
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(inputs, node.args[1:], strict=True))
    with module.graph.inserting_before(node):
        output = module.graph.graph_copy(body.graph, values)
    made = [values[old] for old in body.graph.nodes if old.op not in ("placeholder", "output")]
    for new in made:
        if new.op == "get_attr":
            new.target = _adopted(module, attribute(body, str(new.target)), str(new.target))
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


def _straight_entry(entry: Any) -> Any:
    return (_straight(entry[0]), *entry[1:]) if isinstance(entry, tuple) else entry


def _straight(path: str) -> str:
    return _THROUGH_FORWARD.sub("", path)


def _adopted(module: fx.GraphModule, value: Any, path: str) -> str:
    """The name under which a module has what one of its inner graphs had."""
    stem = path.replace(".", "_")
    number = 0
    while hasattr(module, name := f"{stem}_{number}"):
        number += 1
    setattr(module, name, value)
    return name
