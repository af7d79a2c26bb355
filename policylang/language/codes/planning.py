"""APL301–APL320 and APL386: the meeting of a policy with one graph."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL301",
        "matches nothing",
        "A rule, or an expectation about a set of nodes, whose selector matches no node of this graph. A rule that "
        "silently does nothing is how a policy stops working after a model has changed, so it is an error. The "
        "message lists what each part of the selector matched on its own: the first part with 0 is the one to look "
        "at. A rule that may match nothing, because the policy serves several models, is written `optional`.",
        wrong="save mm in encoder.*",
        mended="optional save mm in encoder.*",
    ),
    Code(
        "APL302",
        "no such blocks",
        "The glob of `blocks` matches no module path of this graph, so there is nothing to count per block. The "
        "nearest paths are listed; `layers.*` matches `layers.0` and `model.layers.0`, a leading `/` ties the glob "
        "to the root.",
        wrong="blocks encoder_layers.*",
        mended="blocks layers.*",
    ),
    Code(
        "APL303",
        "decides nothing: overridden",
        "Later rules take over every node that this rule matches: the last rule that matches a node decides. The "
        "rule is either left over, or stands in the wrong place: exceptions come after the rule they are "
        "exceptions to.",
        wrong="save mm\nrecompute everything",
        mended="recompute everything\nsave mm",
        severity=Severity.WARNING,
    ),
    Code(
        "APL304",
        "cannot be recomputed correctly",
        "A rule asks for the recomputation of a value that a second run would not give again: it draws random "
        "numbers that this path cannot replay, reads memory that the graph changes, writes to its arguments, or "
        "has effects. Only values that the backward needs are looked at. Save them with a later rule; where the "
        "rule is `optional` they are saved without being asked, and the report says so.",
        wrong="recompute everything",
        mended="recompute everything\nsave random",
    ),
    Code(
        "APL305",
        "expectation failed",
        "An `expect` line does not hold on this graph. The message gives the figure found; for a figure per block, "
        "that of the block that fails worst.",
        wrong="expect saved per block <= 1 B",
        mended="expect saved per block <= 220 MiB",
    ),
    Code(
        "APL306",
        "this path cannot do that",
        "The policy asks for something that the way it is being applied cannot carry out: offloading or a rewrite "
        "of collectives in eager or behind a hook of Inductor's, or leaving values to PyTorch's partitioner where "
        "there is none. It is refused, since a line that is ignored would look like one that works. Here an eager "
        "checkpoint is asked to offload, which a compiled model and a flat graph do.",
        wrong="offload attention",
        mended="save attention",
    ),
    Code(
        "APL307",
        "decides nothing: the user's own checkpoint",
        "Every node that the rule matches lies in a region of the model's own `checkpoint(...)` and keeps the tag "
        "it has there. `override` makes a rule change such nodes too.",
        wrong="save mm",
        mended="override save mm",
        severity=Severity.WARNING,
    ),
    Code(
        "APL308",
        "a discrete choice is saved",
        "What decides where values go (topk, argmax, sort or multinomial whose result steers an index, a gather or a "
        "scatter: the router of a mixture of experts) is saved even where a sweeping rule recomputes it. A second run "
        "may sum in another order, and the smallest difference then sends a token elsewhere in the backward than in "
        "the forward. A rule that names the operator itself, as `recompute topk` does, is followed, and so is the "
        "model's own checkpoint.",
        wrong="recompute everything",
        mended="recompute everything\nrecompute topk",
        severity=Severity.NOTE,
    ),
    Code(
        "APL309",
        "changes nothing: not needed",
        "A rule decides values of which the backward needs none, so it neither saves nor recomputes anything. The "
        "usual case is a product that is to be recomputed while a view of it is saved by another line: the saved "
        "view keeps all of the product's memory. Say the same of the view, with a chain or by recomputing everything "
        "first. An `optional` rule may have no effect and is not warned about.",
        wrong="undecided -> save\nrecompute mm",
        mended="undecided -> save\nrecompute mm, chain after mm",
        severity=Severity.WARNING,
    ),
    Code(
        "APL310",
        "a recorded value is lost",
        "A partition leaves a record on every operator whose value it saved, and `where recorded saved` finds these "
        "values again when the forward is compiled a second time, even where an operator has been decomposed. Here a "
        "record is on no forward node, or what came of the operator has no one result, or the first partition saved "
        "some outputs of an operator and recomputed others, which no decision says. Saving what is left would not be "
        "the first decision, so it is an error; the details name the values.",
    ),
    Code(
        "APL311",
        "nothing to rewrite",
        "The graph has nothing that a `fuse` or `collapse` line could change: no gather reads another gather, straight "
        "or through layout operators, for one. Like a rule that matches nothing this is an error, so that a rewrite "
        "which never fires is noticed; `optional` lets it pass.",
        wrong="fuse all_gather chains",
        mended="optional fuse all_gather chains",
    ),
    Code(
        "APL312",
        "every rewrite is refused",
        "The graph has what a `fuse` or `collapse` line looks for, and each candidate was left as it is. The details "
        "name them with the reasons: another reader of a value in between, another dtype, groups that overlap, a mesh "
        "dimension that the line leaves out. Reports list these reasons for every candidate, whether or not others "
        "were rewritten.",
        wrong="fuse all_gather chains over dp",
        mended="fuse all_gather chains over dp, tp",
        severity=Severity.WARNING,
    ),
    Code(
        "APL313",
        "values that stay on the device",
        "A rule offloads values of which some stay where they are, as saved values. Moving them would free nothing: a "
        "graph input, a parameter or an output is alive anyway, and so is memory into which another saved value looks. "
        "Or they would come back changed: the backward writes to them. Or the budget of the rule (`up to 8 GiB per "
        "rank`) has no room left. The details give the reason for each. It is a note: the rule says the most that may "
        "be moved.",
        severity=Severity.NOTE,
    ),
    Code(
        "APL316",
        "an `offload` that moves nothing",
        "Every value that the rule offloads, and the backward needs, stays on the device. Moving them would free "
        "nothing, they would come back changed, or the budget is smaller than any of them. The details give the "
        "reason for each. Where that is as it should be, `optional` makes it a note.",
        severity=Severity.WARNING,
    ),
    Code(
        "APL317",
        "a recorded value is recomputed after all",
        "A rule keeps what an earlier partition of the same forward saved (`where recorded saved`), and nodes that it "
        "matches carry tags of the model's own `checkpoint(...)`, which outrank a rule without `override`. These tags "
        "came along from the first compilation, which has followed them or overridden them already: what it recorded "
        "is the outcome. Obeying them a second time would recompute what was saved. `override` repeats the decision.",
        wrong="recompute everything\nsave everything where recorded saved",
        mended="override recompute everything\noverride save everything where recorded saved",
    ),
    Code(
        "APL318",
        "gathers that a contract leaves",
        "An `override` about gathers of parameters (`all_gather where from parameter`, FSDP's contracts) stands on a "
        "graph that gathers other inputs in the same way: a sharded buffer, such as a table of rotary embeddings, or "
        "an input of the model. They are no weights: the rule does not decide about them, and what else the policy "
        "says holds. The details name those whose values the backward needs. A line of their own, with `from buffer` "
        "or `from input`, decides about them too.",
        wrong="include <fsdp_reshard_always>",
        mended="include <fsdp_reshard_always>\noverride must_recompute chain through (all_gather where from buffer)",
        severity=Severity.NOTE,
    ),
    Code(
        "APL386",
        "a threshold that the batch can flip",
        "Under `torch.compile` a rank that meets a batch of another size compiles the same code again, alone: what it "
        "then decides cannot be compared with the other ranks. A rule here decides by a size that changes with the "
        "batch (`bytes`, `numel`, `flops`, `shape[i]`, `crosses cut`), and where the value is recomputed a collective "
        "runs again with it. The rank would run that collective in its backward and the others would not, or they "
        "would and it would not: all of them wait for ever. The details name the values, each with such a collective. "
        "Nothing is said where it cannot happen: the size follows from parameters alone, as that of a gathered weight "
        "does; the threshold is met by a single token, or by no batch a thousand times as large; or the same "
        "collectives run either way. Decide by name, module or position in place of size, or let every rank compile "
        "for the same sizes: drop a last batch that is smaller, pad to a fixed length.",
        wrong="undecided -> recompute\nsave mm where bytes > 64 MiB",
        mended="undecided -> recompute\nsave mm in layers.*.feed_forward",
        severity=Severity.WARNING,
    ),
)
