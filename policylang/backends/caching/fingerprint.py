"""Keys of compiled graphs: digests of the policy, of the code that acts on it, and of the graph.

Inductor's caches key a graph by its code and its inputs. A policy also reads what is not in the code (module paths,
annotations), so that has to enter the key of the partitioner, or a model whose modules were renamed would be handed
the decisions of the old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import fx

from policylang.backends.caching import sources
from policylang.backends.runtime import groups
from policylang.graph import marks
from policylang.language.diagnostics import CODES
from policylang.language.syntax import Policy
from policylang.operators.flops import registered_formulas
from policylang.planning.digest import digest_of, policy_text
from policylang.torch_compat import inductor, partition, store


def policy_key(policy: Policy, *, root: str) -> str:
    """Hex SHA-256 over the policy's resolved text, the options, and the source of everything that acts on them."""
    return digest_of(("policy", code_digest(), root, policy_text(policy)))


@cache
def code_digest() -> str:
    """Over the source files that decide what a policy does to a graph, and over which findings stop a compile.

    The version of the language is in the files.
    """
    acting = sources.acting(files("policylang"))
    words = [word for path, content in acting.items() for word in (path, hashlib.sha256(content).hexdigest())]
    words += [f"{code} {CODES[code].severity.value}" for code in sorted(CODES)]
    return digest_of(words)


def context_of(graph: fx.GraphModule) -> str:
    """Over what a policy may read of Dynamo's graph that the graph's code does not say."""
    return context_of_graphs(module.graph for module in _modules(graph))


def context_of_graphs(graphs: Iterable[fx.Graph]) -> str:
    """The same of a graph that has no module yet, and of those nested in it."""
    return digest_of(word for graph in graphs for node in graph.nodes for word in _unwritten(node))


def groups_key(policy: Policy) -> str:
    """Over the process groups around, where the policy rewrites collectives: no graph says what ranks they have."""
    return digest_of([groups.surroundings()]) if policy.rewrites else ""


def formulas_key() -> str:
    """Over the FLOP formulas that the program has registered: decisions and figures go by them."""
    registered = registered_formulas()
    return digest_of(registered) if registered else ""


def sidecar_key(key: str, graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Over everything that decides which compiled graph Inductor would take from its caches.

    ``key`` is the partitioner's. A sidecar names process groups as its rank knows them, so each rank has its own.
    Symbolic sizes count by name: their present values say nothing of a cached graph.
    """
    words = [key, torch.__version__, str(torch.is_grad_enabled()), store.place_among_ranks()]
    words += (module.code for module in _modules(graph))
    words += (_input_word(value) for value in inputs)
    words += _autocast({"cpu"} | {value.device.type for value in inputs if isinstance(value, torch.Tensor)})
    words += inductor.settings_lines("inductor", inductor.inductor_settings())
    words += inductor.settings_lines("functorch", partition.functorch_settings())
    return digest_of(words)


def _modules(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and those nested in it, in a fixed order."""
    return (module for _, module in graph.named_modules() if isinstance(module, fx.GraphModule))


def _unwritten(node: fx.Node) -> Iterator[str]:
    stack = node.meta.get("nn_module_stack") or {}
    yield "|".join(str(path) for path, _ in stack.values())
    annotations = marks.custom(node.meta)
    yield repr(sorted((str(name), repr(value)) for name, value in annotations.items()))


def _input_word(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    strides = tuple(map(str, value.stride())) if value.layout is torch.strided else ()
    sizes = tuple(map(str, value.shape))
    kind = type(value).__name__
    return f"{kind} {value.dtype} {value.device} {sizes} {strides} {value.requires_grad}"


def _autocast(devices: set[str]) -> Iterator[str]:
    for name in sorted(devices):
        if torch.is_autocast_enabled(name):
            yield f"autocast {name} {torch.get_autocast_dtype(name)}"
