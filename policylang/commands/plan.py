"""``policylang plan``, ``diff``, ``show`` and ``explain``: commands on a graph, and the meaning of words and codes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from attrs import evolve

from policylang.api.load import KEYS, device_of
from policylang.commands import inputs
from policylang.commands.output import Exit, UsageError, add_form, say, status_line, tell, write_output
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts
from policylang.language.diagnostics import CODES, Code, diagnose, is_error
from policylang.language.files import SUFFIX, find_policy
from policylang.language.globs import PathGlob, name_glob_problem, path_glob_problem
from policylang.language.operators import group_names
from policylang.language.shown import counted, did_you_mean, nearest
from policylang.language.words import meanings, senses
from policylang.planning.capabilities import capabilities_for
from policylang.planning.plan import Plan, digest_of
from policylang.report.diagnostics import render_text
from policylang.report.rendering import columns

if TYPE_CHECKING:
    from policylang.report.explain import Explained


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy", metavar="POLICY", help="a policy file, a bundled policy by its bare name, or - for standard input"
    )
    inputs.add_options(parser, *inputs.PLANNING)
    inputs.add_pipeline(parser)
    add_form(parser, "json")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--summary", action="store_true", help="print the totals and the expectations, and no more")
    much.add_argument(
        "--values", action="store_true", help="print the largest values at the peak and those of each block too"
    )
    parser.add_argument("--html", metavar="OUT.html", help="write the plan as a page as well")
    help = "write the step over time as well, as a Chrome trace: what computes, communicates and is alive"
    parser.add_argument("--trace", metavar="OUT.json", help=help)


def plan(options: argparse.Namespace) -> Exit:
    """Show what a policy does to a graph, before anything is compiled: what is saved and recomputed in each block and
    by which line, the memory over the step, and what each rule is worth.

    The graph is a snapshot (see `policylang snapshot`), a recorded graph or a graph as text; no model, no GPU and,
    unless --import is given, no torch are needed. --summary prints the totals and the expectations alone, --values
    every value as well. --html writes one page that needs nothing else: memory over time, the blocks, every value
    beside the policy. --device adds times: of recomputation on a device, and of the step; --trace then writes the step
    over time, for https://ui.perfetto.dev.

    --schedule, --stages and --microbatches plan the model as a pipeline: what each stage holds and computes over the
    whole schedule. The graph is one microbatch through the whole model.

    For a policy that orders collectives (bucket, prefetch, delay, overlap, keep order), also what each line moves, and
    how much communication stays exposed. The JSON has the full order.

    examples:

      policylang plan llama3_sac --graph llama3_8b.graph --summary
      policylang plan mine.apl --graph llama3_8b.graph --values
      policylang plan mine.apl --graph llama3_8b.graph --html plan.html
      policylang plan mine.apl --graph llama3_8b.graph --device h100-sxm --trace step.json
      policylang plan mine.apl --graph llama3_8b.graph --path eager --output-format json
      policylang plan mine.apl --graph llama3_8b.graph --schedule 1f1b --stages 4 --microbatches 16
      echo 'save attention in block' | policylang plan - --graph llama3_8b.graph

    exit codes: 0 planned, 1 errors between the policy and the graph (the plan is shown all the same), 2 a file that
    cannot be read or written
    """
    from policylang.planning.inspection.breakdown import breakdown
    from policylang.planning.inspection.worth import weighed, worth_of_edits, worth_of_rules
    from policylang.report.plan_json import chrome_trace, plan_json
    from policylang.report.plan_page import plan_page
    from policylang.report.plan_text import plan_text

    device, pipeline = inputs.take_graph(options), inputs.pipeline_of(options)
    how: dict[str, Any] = {"path": options.path, "device": device, "pipeline": pipeline}
    result = inputs.check_policies([options.policy], graph=options.graph, **how)
    result = evolve(result, diagnostics=options.taken.placed(result.diagnostics))
    if len(result.plans) != 1:
        if not result.diagnostics:
            problem = diagnose("APL104", "a plan is made of one policy", help="name one .apl file")
            result = evolve(result, diagnostics=(problem,))
        return inputs.print_findings(result, options.output_format, failed=True)
    (made,) = result.plans
    capabilities = capabilities_for(made.facts.kind, options.path)
    found = breakdown(made)
    whole = options.html or not options.summary
    with status_line() as line:
        worth = worth_of_rules(made, capabilities, _weighing(line, "rule")) if whole else ()
        edits = worth_of_edits(made, capabilities) if whole else ()
        if whole and found.communication is not None:
            order = weighed(found.communication, made, capabilities, progress=_weighing(line, "scheduling line"))
            found = evolve(found, communication=order)
    if options.output_format == "json":
        say(plan_json(found, worth, result.diagnostics, edits=edits, summary=options.summary), "json")
    else:
        if result.diagnostics:
            say(render_text(result.diagnostics) + "\n")
        say(plan_text(found, worth, edits, summary=options.summary, values=options.values))
    if options.html:
        write_output(plan_page(found, worth, Path(options.graph).name), options.html)
    if options.trace:
        if made.shown_times is None:
            raise UsageError("a trace has times, and no device is given", "name one with `--device`, such as h100-sxm")
        if made.checkpoints is not None:
            message = "a model in eager does not run in the order of its graph"
            raise UsageError(message, "trace it for another `--path`")
        write_output(chrome_trace(found), options.trace)
    return Exit.DIAGNOSTICS if any(map(is_error, result.diagnostics)) else Exit.CLEAN


def _weighing(line: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    return lambda done, of: line(f"weighing {what} {done} of {of}")


def diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="the policy before the change")
    parser.add_argument("new", metavar="NEW", help="the policy after it")
    inputs.add_options(parser, *inputs.PLANNING)
    add_form(parser, "markdown", "json", help="markdown is meant for a comment on a review (default: text)")


def diff(options: argparse.Namespace) -> Exit:
    """Compare two policies on a graph: the nodes whose decision changes, with the costs and savings.

    For policies that schedule, also the collectives that start or are awaited elsewhere, or join others.

    Exit code 0 means that the two decide alike, whatever their text: "this refactor of the policy changes nothing". One
    of the two may be `-`, the standard input.

    examples:

      policylang diff main.apl mine.apl --graph llama3_8b.graph
      git show main:mine.apl | policylang diff - mine.apl --graph llama3_8b.graph --output-format markdown
      policylang diff main.apl mine.apl --graph llama3_8b.graph --device h100-sxm
      policylang diff llama3_sac mine.apl --graph llama3_8b.graph --path eager

    exit codes: 0 nothing changes, 1 a decision or the order of collectives does, or a policy has errors, 2 a file that
    cannot be read
    """
    from policylang.planning.inspection.compare import compare
    from policylang.report.plan_comparison import comparison_json, comparison_markdown, comparison_text

    inputs.once_at_most(options.old, options.new)
    device = inputs.take_graph(options)
    facts = inputs.read_graph(options.graph)
    policies = [inputs.read_policy(name, facts) for name in (options.old, options.new)]
    plans = [inputs.planned(policy, facts, options.path, device) for policy in policies]
    known = [made.times.device for made in plans if made.times is not None]
    if len(known) == 1:  # where one of them names a device, the other is timed on it too
        plans = [inputs.planned(policy, facts, options.path, known[0]) for policy in policies]
    inputs.warn_of_devices(facts, *plans)
    for name, plan in zip((options.old, options.new), plans, strict=True):
        # A policy that does not fit the graph would not be applied; its decisions can still be compared.
        if errors := sum(map(is_error, plan.diagnostics)):
            what = "an error" if errors == 1 else counted(errors, "error")
            tell(f"warning: `{name}` has {what} on this graph; `policylang check` lists them")
    found = compare(*plans)
    renderers = {"text": comparison_text, "markdown": comparison_markdown, "json": comparison_json}
    say(renderers[options.output_format](found), options.output_format)
    return Exit.CLEAN if found.same else Exit.DIAGNOSTICS


def show_arguments(parser: argparse.ArgumentParser) -> None:
    help = "a snapshot, a recorded graph in JSON, or a graph as text, as `--graph` takes it (default: the project's)"
    parser.add_argument("graph", nargs="?", metavar="GRAPH", help=help)
    help = "list the nodes in these modules, such as 'layers.0.*'; may be given several times"
    parser.add_argument("--module", action="append", default=[], metavar="GLOB", help=help)
    help = "list the nodes that call these operators, such as mm or '*attention*'; may be given several times"
    parser.add_argument("--operator", action="append", default=[], metavar="GLOB", help=help)
    parser.add_argument(
        "--blocks", metavar="GLOB", help="the blocks, as in a policy's `blocks` line; by default the numbered layers"
    )
    inputs.add_options(parser, "--device", "--no-project")
    add_form(parser, "json", help="json has one entry a node (default: text)")


def show(options: argparse.Namespace) -> Exit:
    """Show what is in a graph: its operators, modules and blocks with their bytes and FLOPs, and the names of its
    nodes.

    With --module or --operator, the nodes of those modules that call those operators, one a line. A module is named as
    a policy names it behind `in`: `layers.0.attention`, `layers.*.mlp`, or any part of a path. With --device, the time
    of all of these as well, what takes longest first. Needs no torch, a recorded graph in JSON excepted.

    examples:

      policylang show llama3_8b.graph
      policylang show llama3_8b.graph --module 'layers.0.*'
      policylang show llama3_8b.graph --module 'layers.*.feed_forward' --operator mm
      policylang show llama3_8b.graph --device h100-sxm
      policylang show llama3_8b.graph --output-format json | jq '.nodes[] | select(.bytes > 1e9)'

    exit codes: 0 shown, 1 a file that is no graph, 2 a file that cannot be read, or nothing of that name in the graph
    """
    from policylang.graph.blocks import blocks_of
    from policylang.planning.inspection.compare import overview, rows_asked
    from policylang.planning.selection.no_match import nearest_paths_hint
    from policylang.report.plan_comparison import nodes_text, overview_json, overview_text
    from policylang.simulation.node_times import lacking, node_times

    for glob in (*options.module, *filter(None, (options.blocks,))):
        if problem := path_glob_problem(glob):
            raise UsageError(f"the module path `{glob}` {problem}")
    for glob in options.operator:
        if problem := name_glob_problem(glob):
            raise UsageError(f"the operator `{glob}` {problem}")
    device = inputs.take_graph(options, "policylang show GRAPH")
    facts = inputs.read_graph(options.graph)
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
    from policylang.planning.inspection.compare import rows_asked
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


_CODE_LIKE = re.compile(r"APL\d*$", re.IGNORECASE)
_WIDEST = 100
_MOST_LINES = 12
_HOW = "policylang explain POLICY --graph GRAPH --node NAME (or --rule LINE)"


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    help = "such as APL101; with --node or --rule, a policy; with nothing, all codes"
    parser.add_argument("subject", nargs="?", metavar="CODE|POLICY", help=help)
    inputs.add_options(parser, *inputs.PLANNING)
    asked = parser.add_mutually_exclusive_group()
    help = "what each rule does to this node of the graph; a glob over names and a module path name several"
    asked.add_argument("--node", metavar="NAME", help=help)
    asked.add_argument("--rule", metavar="LINE", help="what the rule in this line does; FILE:LINE in an included file")
    add_form(parser, "json")


def explain(options: argparse.Namespace) -> Exit:
    """Explain a diagnostic code, a word of the language, or what a policy decides on a graph.

    With a code such as APL101: its page; with nothing: all codes. With a word such as save or 'crosses block': its
    meaning, and an example. With a policy and --graph, --node NAME shows for each rule whether it matches the node,
    which part of it excludes the node, and which rule decides; --rule LINE what each part of a rule matches, and which
    rules override it. Name a node by its name, by a glob over names, or by its module path as a policy writes it after
    `in`; several nodes get a line each.

    For a collective, --node also shows which scheduling lines joined or moved it, from where to where, and how much of
    it is exposed; for a scheduling line, --rule shows what it picks and moves, and what would be exposed without it.

    examples:

      policylang explain APL301
      policylang explain recompute
      policylang explain mine.apl --graph llama3_8b.graph --node mm_3
      policylang explain mine.apl --graph llama3_8b.graph --node 'layers.0.attention.*'
      policylang explain mine.apl --graph llama3_8b.graph --rule 12 --device h100-sxm

    exit codes: 0 explained, 1 a policy with errors, 2 no such code, node, rule or file
    """
    given = {name for name in ("graph", "node", "rule", "device") if getattr(options, name) is not None}
    if given:
        text, data = _on_graph(options, given)
    else:
        text, data = _explained(options.subject)
        data = {"version": 1, **data}
    if options.output_format == "json":
        say(json.dumps(data, indent=2), "json")
    else:
        say(text)
    return Exit.CLEAN


def _on_graph(options: argparse.Namespace, given: set[str]) -> tuple[str, dict[str, Any]]:
    """A node, or a statement of a policy, as text and as data."""
    from policylang.report.explain import NothingToExplain, explain_named

    if options.subject is not None and not {"node", "rule"} & given:
        fix = _HOW.replace("POLICY", options.subject)
        raise UsageError(f"name what to explain of `{options.subject}`? a node, or a rule", fix)
    inputs.take_settings(options, *KEYS)
    if options.subject is None or options.graph is None:
        raise UsageError("a node or a rule is explained of a policy on a graph", _HOW)
    inputs.tell_settings(options)
    device = device_of(options.device)
    facts = inputs.read_graph(options.graph)
    plan = inputs.planned(inputs.read_policy(options.subject, facts), facts, options.path, device)
    inputs.warn_of_devices(facts, plan)
    if options.node is None:
        found: Sequence[Explained] = [_of_line(plan, options.subject, options.rule, options.path)]
    else:
        try:
            found = explain_named(plan, options.node)
        except NothingToExplain as error:
            raise UsageError(*error.args) from None
    return "\n\n".join(map(str, found)), {key: value for each in found for key, value in each.to_dict().items()}


def _of_line(plan: Plan, policy: str, text: str, path: str | None) -> Explained:
    """The statement that begins in a line: of the policy's file, unless the text names another."""
    from policylang.report.explain import explain_statement, explained_statements

    rules, lines = explained_statements(plan)
    own = inputs.STDIN_NAME if policy == inputs.STDIN else find_policy(policy)[1]
    file, _, line = text.rpartition(":")
    for span in (*lines, *rules):
        if str(span.line) == line and span.source.name == (file or own):
            return explain_statement(plan, span, capabilities_for(plan.facts.kind, path))
    known = [span.location if span.source.name != own else str(span.line) for span in (*rules, *lines)]
    shown = ", ".join(known if len(known) <= _MOST_LINES else [*known[:_MOST_LINES], "…"])
    fix = f"its rules begin in {shown or 'no line: it has none'}"
    raise UsageError(f"no rule of the policy begins in line `{text}`", fix)


def _explained(subject: str | None) -> tuple[str, dict[str, Any]]:
    """The explanation as text and as data: of a word of the language, a code, or, without a subject, all codes."""
    from policylang.report.explain import meanings_data, meanings_text, of_group

    if subject is None:
        codes = sorted(CODES.items())
        data = [{"code": code, "title": e.title, "severity": e.severity.value} for code, e in codes]
        return "\n".join(f"{code}  {entry.title}" for code, entry in codes), {"codes": data}
    word = " ".join(subject.split())
    if found := (*senses(word), *of_group(word)):
        return meanings_text(word, found), meanings_data(word, found)
    entry = _entry(subject)
    examples = (("Wrong", entry.wrong), ("Right", entry.mended))
    shown = (f"{label}:\n\n{indent(text, '    ')}" for label, text in examples if text)
    text = fill(entry.text, width=columns(_WIDEST) or _WIDEST)
    said = {"title": entry.title, "severity": entry.severity.value, "text": entry.text}
    return (
        "\n\n".join((f"{entry.code}: {entry.title} ({entry.severity.value})", text, *shown)),
        {"code": entry.code, **said, "wrong": entry.wrong, "right": entry.mended},
    )


def _entry(code: str) -> Code:
    if (entry := CODES.get(code.upper())) is not None:
        return entry
    near = nearest(code.upper(), CODES, limit=1)
    fix = did_you_mean(near) or "`policylang explain` lists all codes"
    if _CODE_LIKE.match(code):
        raise UsageError(f"no diagnostic has the code `{code}`", fix)
    if code == inputs.STDIN or find_policy(code)[0].is_file() or code.endswith(SUFFIX):
        fix = _HOW.replace("POLICY", code)
        raise UsageError(f"`{code}` is a policy, and what a policy decides is explained on a graph", fix)
    if near:
        raise UsageError(f"no diagnostic has the code `{code}`", fix)
    known = (*(word for each in meanings() for word in each.words), *group_names())
    fix = did_you_mean(nearest(code, known)) or fix
    raise UsageError(
        f"`{code}` is neither a diagnostic code nor a word of the language nor a policy that is here", f"{fix}; {_HOW}"
    )


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="POLICY", help="the recipe that the training ran under")
    what = "what `policylang.watch` recorded, such as run.json"
    parser.add_argument("--run", dest="recorded", required=True, metavar="FILE", help=what)
    add_form(parser, "json", "markdown")


def compare(options: argparse.Namespace) -> Exit:
    """Compare what was planned for a policy with what the first steps of a training took, as `policylang.watch`
    recorded it: peak, time, what each line saves, and what the step waits for.

    examples:

      policylang compare recipe.apl --run run.json
      policylang compare recipe.apl --run run.json --output-format markdown

    exit codes: 0 compared, 1 the file is no such run, or of another policy, 2 a policy that cannot be read
    """
    from policylang.report.plan_comparison import run_markdown, run_text

    run, policy = inputs.read_run(options.recorded), inputs.read_policy(options.policy)
    if run["digest"] != digest_of([policy.canonical]):
        message = f"`{options.recorded}` was recorded under another text than that of `{options.policy}`"
        help = "record the training again under the policy as it is"
        raise PolicyGraphError([diagnose(inputs.NO_RUN, message, help=help)])
    if options.output_format == "json":
        say(json.dumps(run, indent=2), "json")
    else:
        say(run_markdown(run) if options.output_format == "markdown" else run_text(run), options.output_format)
    return Exit.CLEAN
