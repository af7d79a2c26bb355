"""Show what is in a graph: its operators, modules and blocks with their bytes and FLOPs, and the names of its nodes.

With --module or --operator, the nodes of those modules that call those operators, one a line. A module is named as a
policy names it behind `in`: `layers.0.attention`, `layers.*.mlp`, or any part of a path. With --device, the time of all
of these as well, what takes longest first. Needs no torch, a recorded graph in JSON excepted.

examples:

  policylang show llama3_8b.graph
  policylang show llama3_8b.graph --module 'layers.0.*'
  policylang show llama3_8b.graph --module 'layers.*.feed_forward' --operator mm
  policylang show llama3_8b.graph --device h100-sxm
  policylang show llama3_8b.graph --output-format json | jq '.nodes[] | select(.bytes > 1e9)'

exit codes: 0 shown, 1 a file that is no graph, 2 a file that cannot be read, or nothing of that name in the graph
"""

from __future__ import annotations

import argparse

from policylang.commands.inputs import add_form, add_options, read_graph, take_graph
from policylang.commands.output import Exit, UsageError, say
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts
from policylang.language.globs import PathGlob, name_glob_problem, path_glob_problem
from policylang.language.shown import did_you_mean, nearest


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "graph",
        nargs="?",
        metavar="GRAPH",
        help="a snapshot, a recorded graph in JSON, or a graph as text, as `--graph` takes it (default: the project's)",
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="GLOB",
        help="list the nodes in these modules, such as 'layers.0.*'; may be given several times",
    )
    parser.add_argument(
        "--operator",
        action="append",
        default=[],
        metavar="GLOB",
        help="list the nodes that call these operators, such as mm or '*attention*'; may be given several times",
    )
    parser.add_argument(
        "--blocks",
        metavar="GLOB",
        help="the blocks, as in a policy's `blocks` line; by default the numbered layers",
    )
    add_options(parser, "--device", "--no-project")
    add_form(parser, "json", help="json has one entry a node (default: text)")


def run(options: argparse.Namespace) -> Exit:
    from policylang.graph.blocks import blocks_of
    from policylang.planning.inspection.overview import overview, rows_asked
    from policylang.planning.selection.no_match import nearest_paths_hint
    from policylang.report.graph_overview import nodes_text, overview_json, overview_text
    from policylang.simulation.node_times import lacking, node_times

    for glob in (*options.module, *filter(None, (options.blocks,))):
        if problem := path_glob_problem(glob):
            raise UsageError(f"the module path `{glob}` {problem}")
    for glob in options.operator:
        if problem := name_glob_problem(glob):
            raise UsageError(f"the operator `{glob}` {problem}")
    device = take_graph(options, "policylang show GRAPH")
    facts = read_graph(options.graph)
    blocks = blocks_of(facts, None if options.blocks is None else PathGlob(options.blocks))
    if options.blocks is not None and not blocks.names:
        hint = nearest_paths_hint(options.blocks, facts) or ""
        raise UsageError(f"`{options.blocks}` matches no module path of the graph", hint)
    asked = bool(options.module or options.operator)
    rows = rows_asked(facts, options.module, options.operator) if asked else range(len(facts))
    if asked and not rows:
        raise _nothing(options, facts)
    times = None if device is None else node_times(facts, device)
    if times is not None and (untold := lacking(times)) is not None:
        raise PolicyGraphError([untold])
    found = overview(facts, blocks, rows, times)
    if options.output_format == "json":
        for part in (*overview_json(options.graph, facts, blocks, found), "\n"):
            say(part, "json", end="")
    else:
        say((nodes_text if asked else overview_text)(options.graph, facts, blocks, found))
    return Exit.CLEAN


def _nothing(options: argparse.Namespace, facts: Facts) -> UsageError:
    """Names the first of the globs that matches nothing, with what is near it."""
    from policylang.planning.inspection.overview import rows_asked
    from policylang.planning.selection.no_match import nearest_paths_hint

    for glob in options.module:
        if not rows_asked(facts, [glob]):
            return UsageError(f"no node is in a module `{glob}`", nearest_paths_hint(glob, facts) or "")
    for glob in options.operator:
        if not rows_asked(facts, operators=[glob]):
            names = dict.fromkeys(facts.targets)
            bare = dict.fromkeys(name.split(".")[1] for name in names if "." in name)
            near = did_you_mean(nearest(glob, [*bare, *names]))
            fix = near or f"`policylang show {options.graph}` lists them"
            return UsageError(f"no node calls an operator `{glob}`", fix)
    return UsageError("no node in these modules calls one of these operators")
