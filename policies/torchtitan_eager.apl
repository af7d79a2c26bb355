# TorchTitan's graph memory policy `eager`: selective checkpointing, with every second matmul of a layer recomputed.
#
# What it does    Keeps attention, collectives, routing and every second matmul of a layer, and what one layer hands to
#                 the next; recomputes the rest. The last norm, `lm_head` and the loss stay as they are.
# Where from      `--compile.memory_policy eager` of TorchTitan 0.3.0's graph trainer, which tags the graph of a whole
#                 step. torchtitan_op_sac has the decisions of TorchTitan's eager trainer, which are not quite the same:
#                 here a router's matmul is counted with the others.
# What it costs   Half of the layers' matmul FLOPs once more, and pointwise work.
# How faithful    The same nodes run again, and the same weights are gathered again, in its real trainer. The tags differ
#                 in four places, the last norm among them: docs/torchtitan.md.
# Use it for      models of TorchTitan's: their blocks are `layers`, their head is `lm_head`.
# Not for         other models, whose head has another name: it would be recomputed. There, llama3_sac.

policy torchtitan_eager

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

# TorchTitan counts mm and linear. The same product is a bmm of one matrix where an einsum was taken apart.
let product = mm, aten.linear, bmm where shape[0] == 1, aten.einsum where ndim <= 3
let counted = product outside /{norm,lm_head,loss}*

recompute everything outside /{norm,lm_head,loss}*
optional save compute outside /{norm,lm_head,loss}*
optional save attention outside /{norm,lm_head,loss}*
optional save (aten.linear or aten.einsum) outside /{norm,lm_head,loss}*
optional save (reduce_scatter or all_to_all) outside /{norm,lm_head,loss}*
optional save topk outside /{norm,lm_head,loss}*                # recomputed routing may route differently
optional save aten.max.default outside /{norm,lm_head,loss}*    # the scales of low-precision matmuls
optional recompute every 2nd counted per block

save everything in block where crosses block
save everything outside block feeding (everything in block)

# Counters and running statistics, which TorchTitan recomputes: they would be updated twice, or read after their update.
optional save everything outside /{norm,lm_head,loss}* where is mutated
