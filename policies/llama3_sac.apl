# Selective checkpointing for decoder-only transformers: the policy to try first.
#
# What it does    In every block: keeps attention, every other matmul, and the sum of the attention residual; recomputes
#                 the rest in the backward. Outside the blocks PyTorch decides.
# Where from      TorchTitan's selective checkpointing (see torchtitan_op_sac, which follows it to the letter) and one
#                 line of AutoParallel's: with the first residual sum kept, the backward of the feed-forward does not
#                 have to recompute back through attention. A scheduler that prefetches would otherwise pile up those
#                 chains: +3.30 GB of peak memory became +0.39 GB (AutoParallel, LLaMA-3 8B).
# What it costs   Half of the matmul FLOPs of the blocks' forward once more. `policylang demo` shows its figures on a
#                 small Llama.
# Use it for      Transformers of every kind, in eager, compiled or traced; docs/policies.md has thirty that were tried. If
#                 your blocks have another name, `include <llama3_sac>` below a `blocks` line of your own.
# Not for         convolutional networks (nothing here keeps their convolutions), nor for models where it is the logits
#                 that take the memory: no line reaches outside the blocks.

policy llama3_sac

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

# `residual` is the residual add. Rotary-embedding adds are excluded: their inputs come from `mul`.
let added = add where inputs == 2
let residual = (
    added where module == {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*,
    (added where ndim == 3) except added fed by mul
)

# A product with a weight, however it was traced: an einsum may become a bmm of one matrix. Attention's have many.
let projection = mm, addmm, aten.linear, bmm where shape[0] == 1, aten.einsum where ndim <= 3

recompute everything in block                            # the ground rule
optional save attention in block                         # attention written out in matmuls has no such operator
save matmul in block
optional recompute every 2nd projection per block        # the exception to the line above
optional save first residual per block                   # a block may add both sums at once, or in its modules
save everything in block where crosses block

optional save topk in block                              # MoE: recomputed routing may route differently
optional save (reduce_scatter or all_to_all) in block    # tensor and expert parallel: do not communicate twice
optional save everything in block where is mutated       # a counter or cache would be read after its update
