"""APL3xx: the policy does not fit this graph."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL340",
        "nothing says which nodes are backward",
        "Rules range over the forward part of a graph. A joint graph from AOTAutograd says where that ends: its nodes "
        "are tagged and its tangents are inputs. A whole step traced into one flat graph does not, unless the trace "
        "marks the backward, as Dynamo does from torch 2.12 on, or you do, with torch.fx.traceback.annotate around "
        "torch.autograd.grad. Without a mark a policy would reach backward nodes too, so it is not applied at all.",
    ),
    Code(
        "APL341",
        "a graph of modules or methods",
        "A policy names operators, such as aten.mm, and reads sizes and module paths that AOTAutograd and make_fx "
        "leave on a graph. A graph from torch.fx.symbolic_trace, or as Dynamo hands it to a backend, still calls "
        "modules and methods. Lower it first, or compile the model with policylang.backend, which does.",
    ),
    Code(
        "APL321",
        "a tuple cannot be saved",
        "Only tensors and sizes can be kept from the forward for the backward. This operator returns several values "
        "and a backward node reads them as one, so it has to be recomputed.",
    ),
    Code(
        "APL322",
        "min-cut finds no partition",
        "With `undecided -> auto`, PyTorch's min-cut decides the values that no rule touched. It found that some "
        "value it was left with can be neither saved nor recomputed beside what the rules decided. Decide the rest "
        "yourself, with `undecided -> save` or `undecided -> recompute`.",
    ),
    Code(
        "APL323",
        "not a joint graph",
        "A partitioner splits a joint graph: forward and backward in one, with the gradients that flow in as inputs "
        "called tangents, as AOTAutograd traces it.",
    ),
    Code(
        "APL324",
        "no path for this kind of graph",
        "What is saved and what is recomputed is decided on a joint graph or on a flat one. Of a half of a partition, "
        "or a graph without any backward, the `fuse` and `collapse` lines of a policy are carried out and nothing "
        "else; a policy without such a line has nothing to do there.",
    ),
    Code(
        "APL325",
        "a graph without a policy",
        "`policylang.partition` follows the plan that `policylang.apply` made for this very module. A copy of the "
        "module, or one that came out of another process, has no plan.",
    ),
    Code(
        "APL326",
        "a forward that updates a buffer",
        "The forward half of a partition can be differentiated and compiled again, unless it updates a buffer, as "
        "BatchNorm in training does with its running statistics: autograd would keep contents that are then replaced.",
    ),
    Code(
        "APL327",
        "nothing decided yet",
        "A model has a report once it has run forward with gradients under a policy: compiling happens on the first "
        "call, and without a backward there is nothing to save or to recompute. The report is also missing where the "
        "model was handed to another backend, or to none.",
    ),
    Code(
        "APL328",
        "not a graph",
        "Policies are applied to graph modules (torch.fx.GraphModule), and reports are on those, on models and on "
        "backends. A model has no graph before it is traced, and a function that torch.compile returned cannot be "
        "asked for its graphs: ask the backend it was compiled with.",
    ),
    Code(
        "APL329",
        "only rewrites on a half",
        "The policy was applied to one half of a partition. What is saved was settled when the graph was cut, so the "
        "rules and expectations of the policy say nothing there; its `fuse` and `collapse` lines are carried out.",
        severity=Severity.NOTE,
    ),
    Code(
        "APL330",
        "a line that min-cut does not know",
        "Behind a hook of Inductor's, `policylang.pass_` writes tags, and PyTorch's min-cut partitioner acts on them. "
        "It knows no `prefer_save`, and decides what no rule decided after the pass is done, so that a figure that "
        "depends on it cannot be checked. `policylang.backend` partitions itself and does both.",
    ),
    Code(
        "APL331",
        "a hook that has no joint graph",
        "Of Inductor's hooks, `joint_custom_pre_pass` and `joint_custom_post_pass` are called with the joint graph, "
        "before it is partitioned. The others are called before the backward is traced or with the halves, where "
        "nothing is left to decide.",
    ),
)
