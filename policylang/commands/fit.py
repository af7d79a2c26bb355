"""``policylang fit``: from a model and a cluster to a policy, with its snapshot and its test."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policylang.commands.inputs import UsersCodeError, named_function, need_torch, refuse, show, users_code
from policylang.commands.output import Exit, UsageError, add_form, say, status_line, tell, write_output
from policylang.errors import PolicyError, PolicyMeaningError
from policylang.language.devices.reading import bundled_devices
from policylang.language.shown import format_quantity
from policylang.report.diagnostics import render_json
from policylang.report.plan_comparison import candidate_data, share_text
from policylang.report.rendering import table
from policylang.tuning.tuned_policy import step_words

if TYPE_CHECKING:
    from policylang.api.fit import Answer, Cluster, Fitted, Subject
    from policylang.graph.facts import Facts
    from policylang.tuning.tuned_policy import TunedPolicy

_DTYPES = ("float32", "bfloat16", "float16")
_MOST_RANKS = 16_384  # a weight is cut into as many pieces, one after the other


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="CONFIG|MODULE:FUNCTION",
        help="a config.json of Transformers, a model of its hub, or a function that returns `model, loss_fn, *batch`",
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences or images of one GPU (default: 1)")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs share the weights by FSDP2 (default: 1)")
    parser.add_argument(
        "--mesh", metavar="fsdp=N,tp=N", help="the same with tensor parallelism, by the model's own plan"
    )
    parser.add_argument(
        "--device", metavar="NAME|FILE", help="a bundled profile such as h100-sxm, or a file with one: see docs/time.md"
    )
    parser.add_argument("--peak", metavar="SIZE", help="what a step may take, such as 75GiB (default: the device's)")
    parser.add_argument("--optimizer", metavar="NAME|SIZE", default="adamw", help="as for tune (default: adamw)")
    parser.add_argument("--reserve", metavar="SHARE", default="5%", help="as for tune (default: 5%%)")
    parser.add_argument("--balance", metavar="LOAD", help="as for tune, where sizes of experts come from data")
    parser.add_argument(
        "--path", choices=("eager", "joint"), default="eager", help="eager, or torch.compile (default: eager)"
    )
    parser.add_argument(
        "--weights",
        choices=_DTYPES,
        default="float32",
        help="the dtype of weights, gradients and the optimizer's state (default: float32)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="to compute in (default: bfloat16)")
    parser.add_argument("--alone", action="store_true", help="leave out what other sizes would bring")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the policy goes, such as recipe.apl")
    add_form(parser, "json")


def fit(options: argparse.Namespace) -> Exit:
    """Say whether a training step fits, under which policy, at what cost, and what other sizes would bring.

    The model is built without memory, sharded over GPUs that need not be there, and traced with the kernels of the
    device; the policy is tuned as `policylang tune` does. Weights, gradients and optimizer state are part of the peak.
    With -o recipe.apl the policy, its snapshot recipe.graph and its test recipe.test.md are written.

    examples:

      policylang fit config.json --seq 8192 --gpus 8 --device h100-sxm --peak 75GiB -o recipe.apl
      policylang fit Qwen/Qwen3-8B --seq 4096 --device h200 --weights bfloat16
      policylang fit mymodels:make_step --mesh fsdp=64,tp=8 --device h100-sxm --optimizer adamw --reserve 5%

    exit codes: 0 it fits, 1 it does not, or the model or a size cannot be had, 2 a malformed budget, no such device, or
    a file that cannot be written
    """
    need_torch()
    from policylang.api.fit import Cluster, fit, of_configuration, of_function
    from policylang.api.load import device_of
    from policylang.api.tune import no_budget, read_or_raise
    from policylang.tracing.configured import StepSizes
    from policylang.tuning.budgets import read_budget

    if options.output and Path(options.output).suffix != ".apl":
        raise UsageError(f"`{options.output}` is no policy's name", "end it with `.apl`")
    try:
        device = device_of(options.device)
        if device is None:
            raise UsageError("times need a device", f"name one with `--device`: {', '.join(bundled_devices())}")
        if options.peak is None and device.capacity is None:
            raise PolicyError([no_budget(device)])
        budget = read_or_raise(read_budget(device.capacity if options.peak is None else options.peak, None, None))
        assert budget is not None
        sizes = StepSizes(options.batch, options.seq, _mesh(options), options.weights, options.dtype)
        graph = Path(options.output).with_suffix(".graph").name if options.output else ""
        limit = int(budget.limit)
        also = options.optimizer, options.reserve, options.path, options.balance
        cluster = Cluster(device, options.device, limit, *also)
        if ":" in options.subject and not os.path.exists(options.subject):
            subject = of_function(options.subject, named_function(options.subject))
        else:
            subject = of_configuration(options.subject, sizes, options.path)
        with status_line() as progress, users_code():
            found = fit(subject, sizes, cluster, graph, beside=not options.alone, progress=progress)
    except UsersCodeError as failed:
        if isinstance(failed.error, PolicyError):
            return _refused(failed.error, options.output_format)
        return show(failed, "fit", options.subject, "the function is called with `seq` and `batch`, if it takes them")
    except PolicyError as error:
        return _refused(error, options.output_format)
    files = _written(options.output, found.policy, found.facts) if options.output and found.policy else ()
    if options.output_format == "json":
        say(_json(subject, cluster, found, options.output, files), "json")
    else:
        say("\n\n".join(_text(subject, cluster, found, options.output)))
        if found.answer.refused:
            refuse(found.answer.refused)
    return Exit.CLEAN if found.policy else Exit.DIAGNOSTICS


def _refused(error: PolicyError, form: str) -> Exit:
    refuse(error.diagnostics, form)
    return Exit.USAGE if isinstance(error, PolicyMeaningError) else Exit.DIAGNOSTICS


def _mesh(options: argparse.Namespace) -> dict[str, int]:
    """The ranks of each dimension. Raises PolicyGraphError."""
    from policylang.tracing.configured import SIZES
    from policylang.tracing.step import problem

    if options.gpus is not None and options.gpus < 1:
        raise problem(SIZES, f"a step needs one GPU at least, and not {options.gpus}")
    asked = f"fsdp={options.gpus or 1}" if options.mesh is None else options.mesh
    found = re.findall(r"(fsdp|tp)=(\d{1,9})(?:,|$)", asked)
    mesh = {name: int(size) for name, size in found}
    if ",".join(f"{name}={size}" for name, size in found) != asked or len(mesh) < len(found) or 0 in mesh.values():
        help = "write how many ranks share what: `fsdp=8,tp=2`; of replicas, name the mesh of one"
        raise problem(SIZES, f"`{options.mesh}` is no mesh", help=help)
    ranks = mesh.get("fsdp", 1) * mesh.get("tp", 1)
    if ranks > _MOST_RANKS:
        help = "with replicas, name the ranks that share one copy of the weights"
        raise problem(SIZES, f"{ranks:,} ranks cannot share the weights; at most {_MOST_RANKS:,} can", help=help)
    if options.gpus not in (None, ranks):
        message = f"a mesh of `{options.mesh}` has {ranks} ranks, and {options.gpus} GPUs are given"
        raise problem(SIZES, message, help="leave `--gpus` out")
    return mesh


# --- files ----------------------------------------------------------------------------------------------------------


def _written(output: str, policy: TunedPolicy, facts: Facts) -> tuple[str, ...]:
    """The policy, its snapshot, and a test that fails when the policy, its includes or the graph change what is decided
    on its path."""
    from policylang.graph.snapshot import write
    from policylang.language.loader import parse_policy
    from policylang.planning.capabilities import capabilities_for
    from policylang.planning.liveness import saved_and_recomputed
    from policylang.planning.planner import plan

    recipe = Path(output)
    graph, test = recipe.with_suffix(".graph"), recipe.with_suffix(".test.md")
    write_output(policy.text, output)
    write(facts, graph)
    tell(f"wrote {graph}")
    path, parsed = policy.subject.path, parse_policy(policy.text).policy
    assert parsed is not None
    needs = saved_and_recomputed(plan(parsed, facts, capabilities_for(facts.kind, path)))
    claims = f"# saved: {len(needs.saved)}\n# recomputed: {len(needs.recomputed)}"
    block = f'```apl graph={graph.name} path={path}\ninclude "{recipe.name}"\n{claims}\n```'
    write_output(f"# {recipe.name} on {graph.name}\n\n{block}\n", str(test))
    return output, str(graph), str(test)


# --- output ---------------------------------------------------------------------------------------------------------


def _text(subject: Subject, cluster: Cluster, found: Fitted, output: str | None) -> list[str]:
    answer, sizes = found.answer, found.answer.sizes
    ranks = f"{sizes.ranks} × " if sizes.ranks > 1 else ""
    dims = ", ".join(f"{name}={size}" for name, size in sizes.mesh.items())
    mesh = f" ({dims})" if sizes.mesh.get("tp", 1) > 1 else ""
    step = ", ".join(filter(None, (f"seq {sizes.sequence:,}" if sizes.sequence else "", f"batch {sizes.batch} a GPU")))
    limit = format_quantity(answer.peak, "bytes")
    verdict = (
        f"fits: {format_quantity(found.policy.peak, 'bytes')} of {limit}"
        if found.policy
        else f"does not fit into {limit}"
    )
    said = [
        f"{subject.name}, {step}, on {ranks}{cluster.device.name}{mesh}, {_PATHS[cluster.path]}: {verdict}",
        _assumed(cluster, found),
    ]
    if found.policy is not None and not output:
        said.append(found.policy.text.rstrip("\n"))
    rows = [_row(each, answer) for each in (answer, *found.beside)]
    said.append(table([("", "peak", "recomputed", "step", "a token"), *rows], right=range(1, 5)))
    if found.policy is not None:
        lines = _python(subject, cluster, found, output or "recipe.apl")
        said.append("\n".join(("use it:", *(f"    {line}" for line in lines))))
    return said


_PATHS = {"eager": "in eager", "joint": "under torch.compile"}


def _assumed(cluster: Cluster, found: Fitted) -> str:
    """What a peak counts beside activations."""
    from policylang.tuning.budgets import read_optimizer, trained_bytes

    sizes, optimizer, weights = found.answer.sizes, cluster.optimizer, trained_bytes(found.facts)
    parts = {"weights": weights, "gradients": weights, f"state of {optimizer}": read_optimizer(optimizer, found.facts)}
    where = f" over {sizes.ranks} GPUs" if sizes.ranks > 1 else ""
    each = ", ".join(
        f"{name} {format_quantity(size, 'bytes')}" for name, size in parts.items() if isinstance(size, int)
    )
    said = f"kept in {sizes.weights}{where}: {each} a GPU; computed in {sizes.dtype}; {cluster.reserve} in reserve"
    if not found.as_compiled:
        return said
    return f"{said}; traced as under a compiler, which may run other operators than eager: {found.as_compiled}"


def _row(each: Answer, asked: Answer) -> tuple[str, ...]:
    if each.nearest is not None:
        least = format_quantity(each.nearest.besides.on(each.nearest.smallest.peak), "bytes")
        return each.label, f"no: {least} at least" + (f"; {each.ranks} GPUs do" if each.ranks else ""), "", "", ""
    if each.tuned is None:
        return each.label, each.refused[0].message, "", "", ""
    chosen = each.tuned.chosen
    again = f"{format_quantity(chosen.recompute, 'seconds')} ({share_text(chosen.recompute, each.tuned)})"
    first, own = asked.token_seconds, each.token_seconds
    peak = format_quantity(each.tuned.besides.on(chosen.peak), "bytes")
    return each.label, peak, again, step_words(chosen), f"{own / first:.2f}×" if first and own else ""


def _python(subject: Subject, cluster: Cluster, found: Fitted, recipe: str) -> list[str]:
    """What to write in a training. What is compiled returns the loss alone: the gradients of all that it returned would
    be alive as well."""
    sizes, loss, is_joint = found.answer.sizes, subject.loss, cluster.path == "joint"
    mixed = f", mp_policy=MixedPrecisionPolicy(param_dtype=torch.{sizes.dtype})"
    mixed = "" if sizes.weights == sizes.dtype else mixed
    lines = [] if is_joint else [*subject.before, f'policylang.checkpoint_model(model, "{recipe}")']
    if is_joint:
        if sizes.mesh.get("fsdp", 1) > 1:
            lines.append(f'model = data_parallel(model, mesh, mode="fully_shard"{mixed})  # SimpleFSDP, of TorchTitan')
        taken = "**batch" if "**" in loss else "*batch"
        lines.append(f'step = torch.compile(lambda {taken}: {loss}, backend=policylang.backend("{recipe}"))')
        loss = f"step({taken})"
    elif sizes.mesh.get("fsdp", 1) > 1:
        one, *more = found.blocks or ("",)
        blocks = f"({', '.join(f'*{each}' for each in found.blocks)})" if more else one
        each = f"for block in {blocks}: fully_shard(block, mesh=mesh{mixed})"
        lines += [*([each] if blocks else []), f"fully_shard(model, mesh=mesh{mixed})"]
    if sizes.weights != sizes.dtype and sizes.ranks == 1:
        lines += [f'with torch.autocast("{cluster.target.kind}", torch.{sizes.dtype}):', f"    loss = {loss}"]
    return lines


def _json(subject: Subject, cluster: Cluster, found: Fitted, output: str | None, files: tuple[str, ...]) -> str:
    def data(each: Answer) -> dict[str, Any]:
        return {
            "label": each.label,
            "fits": each.tuned is not None,
            "sequence": each.sizes.sequence,
            "batch": each.sizes.batch,
            "mesh": dict(each.sizes.mesh),
            "budget_bytes": each.peak,
            "chosen": candidate_data(each.tuned.chosen, each.tuned) if each.tuned else None,
            "smallest": candidate_data(each.nearest.smallest, each.nearest) if each.nearest else None,
            "token_seconds": each.token_seconds,
            "fits_on_ranks": each.ranks,
            "diagnostics": json.loads(render_json(each.refused))["diagnostics"],
        }

    sizes = found.answer.sizes
    document = {
        "version": 1,
        "subject": subject.name,
        "device": cluster.device.name,
        "path": cluster.path,
        "weights": sizes.weights,
        "dtype": sizes.dtype,
        "assumed": _assumed(cluster, found),
        "answer": data(found.answer),
        "beside": list(map(data, found.beside)),
        "policy": found.policy and found.policy.text,
        "python": _python(subject, cluster, found, output or "recipe.apl") if found.policy else [],
        "files": files,
    }
    return json.dumps(document, indent=2, allow_nan=False)
