"""Write the policy equivalent to TorchTitan's full_recompute_save_ops string.

The string selects operations by module and operator, `layers.*.moe.router.gate::aten.mm.default | …`. With --graph, the
policy is also planned on a graph, which shows what the string selects there.

examples:

  policylang import-torchtitan 'layers.*.moe.router.gate::aten.mm.default | layers.*.attention.wq::aten.mm.default'
  policylang import-torchtitan 'layers.*.attention.wq::aten.mm.default' -o mine.apl --graph deepseek.graph

exit codes: 0 written, 1 something is wrong with the string or on the graph, 2 a file that cannot be read or written
"""

from __future__ import annotations

import argparse

from policylang.api.load import operators_at_hand, operators_in
from policylang.commands.inputs import add_options, read_graph, refuse, write_output
from policylang.commands.output import Exit, say
from policylang.language.diagnostics import is_error
from policylang.language.grammar import is_policy_name
from policylang.language.loader import parse_policy


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("selectors", metavar="SELECTORS", help="'MODULE::OPERATOR | MODULE::OPERATOR | …', quoted")
    parser.add_argument("-o", "--output", metavar="FILE", help="the policy, such as mine.apl; printed without it")
    parser.add_argument("--name", type=_name, default="torchtitan_save_ops", help="the name of the policy")
    add_options(parser, "--graph", "--import")


def run(options: argparse.Namespace) -> Exit:
    from policylang.integrations.torchtitan_save_ops import import_save_ops

    facts = None if options.graph is None else read_graph(options.graph)
    operators = operators_at_hand(met=() if facts is None else operators_in(facts))
    made = import_save_ops(options.selectors, options.name, operators)
    if made.text is None:
        return refuse(made.diagnostics)
    found = list(made.diagnostics)
    if facts is not None:
        from policylang.api.planned_graphs import on_graph

        policy = parse_policy(made.text, name=options.output or f"<{options.name}>", operators=operators).policy
        if policy is not None:
            found.extend(on_graph(policy, {options.graph: facts}, None, one_model=False)[1])
    if found:
        refuse(found)
    if any(map(is_error, found)):
        return Exit.DIAGNOSTICS
    if options.output is None:
        say(made.text.removesuffix("\n"), "policy")
    else:
        write_output(made.text, options.output)
    return Exit.CLEAN


def _name(text: str) -> str:
    if not is_policy_name(text):
        raise argparse.ArgumentTypeError(f"`{text}` cannot be the name of a policy")
    return text
