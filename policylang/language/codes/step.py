"""APL36x: a training step that cannot be traced into a flat graph, or a call that its graph was not traced for."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL360",
        "the loss is not a scalar tensor",
        "`trace_step` differentiates what `loss_fn(model, *batch)` returns, so it has to be a tensor of one element: "
        "not a model's output object, not a tuple of loss and metrics, not an unreduced loss. Return the loss alone; "
        "what else is of interest can be computed outside the step.",
    ),
    Code(
        "APL361",
        "there is no gradient to compute",
        "No parameter of the model requires a gradient, or the loss depends on none that does. A step without "
        "gradients has no backward, and nothing that a policy could save or recompute. The usual causes are a frozen "
        "model, a `detach()` or `no_grad()` between the parameters and the loss, and a loss computed from integers.",
    ),
    Code(
        "APL362",
        "the step depends on the values of its data",
        "A graph is traced from shapes alone. Where Python asks a tensor for its value (`.item()`, `if tensor:`, a "
        "loop over `tensor.tolist()`) the course of the step would depend on data that the graph does not have, and "
        "the branch taken while tracing would be taken for ever. The message names the line. Express the decision in "
        "tensor operators (`torch.where`, masks), or take it outside the traced step.",
    ),
    Code(
        "APL363",
        "the step cannot be traced",
        "Running the step on tensors without data failed, for a reason of its own: the error that was raised is in "
        "the message, and in full above it. Call `loss_fn(model, *batch)` on real tensors first. If that works, the "
        "line that the message names does something that a trace cannot follow, such as handing memory to NumPy or "
        "to a kernel that torch does not know.",
    ),
    Code(
        "APL364",
        "the batch is not the one that was traced",
        "A traced step holds the shapes, types and devices of the batch it was traced with, and the value of "
        "everything in it that is no tensor. A call with another batch would fail somewhere inside the graph or, "
        "worse, compute something else. The message lists what was traced and what came. Trace one step for each "
        "shape, or pad.",
    ),
    Code(
        "APL365",
        "the model has changed since the step was traced",
        "Parameters and buffers are read from the model at each call, so new values are no change: an optimizer's "
        "update and `load_state_dict` are seen. The graph does hold their shapes, types and devices, which of them "
        "require a gradient, and whether each module was in train or eval mode. Trace the step again after "
        "`model.to`, `model.eval`, freezing, or adding a module.",
    ),
    Code(
        "APL366",
        "a value that the step writes shares its memory",
        "The graph writes each buffer once, at its end. If the buffer shares its memory with another input (a view "
        "of it, a slice of one big tensor), a read of the other would have to see the write, and in the graph it "
        "would not. Give each its own memory.",
    ),
    Code(
        "APL367",
        "the optimizer does not fit the step",
        "An optimizer that is traced with a step must update parameters of the model that is traced, and must have "
        "its state already: what it would make in its first step would be made anew at every call. Take one step "
        "with it before tracing. An optimizer made before `model.to(...)` or from another model updates other tensors.",
    ),
    Code(
        "APL368",
        "the step writes to a tensor that is not its own",
        "A traced step writes to parameters, buffers, tensors that modules have as attributes, and the batch, once "
        "each at its end. A tensor that is reached in another way, as a global or in a list, is a constant of the "
        "graph: a write to it would happen while tracing, and in the middle of the graph. Register it as a buffer.",
    ),
)
