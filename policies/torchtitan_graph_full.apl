# TorchTitan's graph memory policy `full`: every layer is recomputed, from what the layer before it handed on.
#
# What it does    Keeps what one layer hands to the next and what draws random numbers; recomputes everything else,
#                 of the embedding too. The last norm, `lm_head` and the loss stay as they were traced.
# Where from      `--compile.memory_policy full` of TorchTitan 0.3.0's graph trainer, which tags the graph of a whole
#                 step. torchtitan_full has the decisions of its eager trainer's full checkpointing instead.
# What it costs   Nearly one more forward pass of the layers in every step.
# How faithful    The same nodes run again, and the same weights are gathered again, in its real trainer, but for the
#                 choice of a router, which is made once. It saves attention kernels with the random operators, as torch
#                 tags them random even without dropout, although it says that it recomputes them: docs/torchtitan.md.
# Use it for      models of TorchTitan's: their blocks are `layers`, their head is `lm_head`.
# Not for         other models, whose head has another name: it would be recomputed.

policy torchtitan_graph_full

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

let handed_on = everything in block where crosses block
let embedded = everything outside block feeding (everything in block)

# Counters and running statistics, which TorchTitan recomputes: they would be updated twice, or read after their update.
let kept = handed_on, embedded, random, aten.*scaled_dot_product*, everything where is mutated

must_recompute everything outside /{norm,lm_head,loss}* except (kept, builtin.getitem fed by kept)  # allow: APL705, as TorchTitan does
save kept outside /{norm,lm_head,loss}*
