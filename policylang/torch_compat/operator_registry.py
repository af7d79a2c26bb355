"""The private names of torch that list its operators."""

from __future__ import annotations

import operator

import torch


def operator_names() -> list[str]:
    """Every operator that the loaded torch knows, in full and sorted: ``aten.mm.default``, ``higher_order.cond``.

    Private because torch lists its operators nowhere in public: dispatched operators, custom ones included, come from
    the dispatcher and from the schema registry (some operators are in one of them alone), higher-order operators from
    the table they enter themselves in.
    """
    names: set[str] = set()
    try:
        full = {str(name) for name in torch._C._dispatch_get_all_op_names()}
        for schema in torch._C._jit_get_all_schemas():
            full.add(f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name)
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__} does not list its operators: {error}") from error
    for name in full:
        namespace, found, rest = name.partition("::")
        if found:
            bare, _, overload = rest.partition(".")
            names.add(f"{namespace}.{bare}.{overload or 'default'}")
    names.update(f"higher_order.{name}" for name in higher_order_names())
    names.update(f"torch.{name}" for name in symbolic_functions())
    names.update(f"builtin.{name}" for name in builtin_functions())
    return sorted(names)


def higher_order_names() -> list[str]:
    """The higher-order operators. Private because ``torch.ops.higher_order`` finds them by name and lists none."""
    from torch import _ops

    table = getattr(_ops, "_higher_order_ops", None)
    if table is None:
        raise RuntimeError(f"torch {torch.__version__} has no table of higher-order operators")
    return sorted(table)


def symbolic_functions() -> list[str]:
    """``torch.sym_max`` and its like, the private ``torch._sym_sqrt`` too: a graph with dynamic shapes calls them."""
    return sorted(name for name in dir(torch) if name.startswith(("sym_", "_sym_")) and callable(getattr(torch, name)))


def builtin_functions() -> list[str]:
    """The Python functions that a graph may call on sizes and tuples, as ``builtin.getitem``."""
    public = [name for name in dir(operator) if not name.startswith("_")]
    return sorted({*public, "abs", "bool", "float", "getattr", "int", "max", "min", "pow", "round", "sum"})


def operator_facts() -> dict[str, list[str]]:
    """What torch says of its operators, as lists of ``namespace.name``.

    ``pointwise``, ``reduction`` and ``random`` are tags that every overload with a functional result carries; ``view``
    lists those whose every result aliases an argument; ``compute`` is the partitioner's own list of compute-intensive
    operators, private because min-cut alone uses it.
    """
    from torch._functorch.partitioners import get_default_op_list

    facts: dict[str, set[str]] = {"pointwise": set(), "reduction": set(), "random": set(), "view": set()}
    tags = {
        "pointwise": torch.Tag.pointwise,
        "reduction": getattr(torch.Tag, "reduction", None),
        "random": torch.Tag.nondeterministic_seeded,
    }
    for namespace in ("aten", "prims"):
        for schema in torch._C._jit_get_all_schemas():
            space, _, name = schema.name.partition("::")
            if space != namespace or schema.is_mutable:
                continue
            packet = getattr(getattr(torch.ops, namespace), name, None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if overload is None:
                continue
            full = f"{namespace}.{name}"
            for fact, tag in tags.items():
                if tag is not None and tag in overload.tags:
                    facts[fact].add(full)
            if schema.returns and all(value.alias_info is not None for value in schema.returns):
                facts["view"].add(full)
    compute = {str(packet) for packet in get_default_op_list().compute_intensive_ops}
    return {**{fact: sorted(names) for fact, names in facts.items()}, "compute": sorted(compute)}
