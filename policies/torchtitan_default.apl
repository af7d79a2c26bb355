# TorchTitan's graph memory policy `default`: selective checkpointing that keeps every matmul.
#
# What it does    Keeps matmuls, attention, collectives and routing, and what one layer hands to the next; recomputes
#                 the rest. The last norm, `lm_head` and the loss stay as they are.
# Where from      `--compile.memory_policy default` of TorchTitan 0.3.0's graph trainer, which tags the graph of a whole
#                 step. Gathered weights are recomputed, that is gathered again. Where TorchTitan is told
#                 `fsdp_reshard_after_forward=never`, add `include <fsdp_reshard_never>` as the last line.
# What it costs   Pointwise work, which is bound by memory bandwidth; no matmul runs twice. torchtitan_eager keeps half
#                 as many.
# How faithful    The same nodes run again, and the same weights are gathered again, in its real trainer. The tags differ
#                 in four places, the last norm among them: docs/torchtitan.md.
# Use it for      models of TorchTitan's: their blocks are `layers`, their head is `lm_head`.
# Not for         other models, whose head has another name: it would be recomputed.

policy torchtitan_default

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

recompute everything outside /{norm,lm_head,loss}*
optional save compute outside /{norm,lm_head,loss}*
optional save attention outside /{norm,lm_head,loss}*
optional save (aten.linear or aten.einsum) outside /{norm,lm_head,loss}*
optional save (reduce_scatter or all_to_all) outside /{norm,lm_head,loss}*
optional save topk outside /{norm,lm_head,loss}*                # recomputed routing may route differently
optional save aten.max.default outside /{norm,lm_head,loss}*    # the scales of low-precision matmuls

save everything in block where crosses block
save everything outside block feeding (everything in block)

# Counters and running statistics, which TorchTitan recomputes: they would be updated twice, or read after their update.
optional save everything outside /{norm,lm_head,loss}* where is mutated
