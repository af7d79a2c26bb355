# Every second transformer block checkpointed in full, the others left alone.
#
# What it does    The 2nd, 4th, 6th, … block keeps only what it hands on and recomputes the rest in the backward. The
#                 blocks between are PyTorch's to decide, as is everything outside the blocks.
# Where from      TorchTitan's layer-selective checkpointing, which wrapped every nth layer.
# What it saves   About half of what torchtitan_full saves, for about half of its cost: one more forward pass of every
#                 second block. Change `2nd` to `3rd` or `4th` to trade memory for speed in steps.
# Use it when     memory is a little short, and one dial is all you want to turn.
# Not when        llama3_sac fits: it keeps the values that are dear to recompute, where this one draws lots by layer.

policy every_2nd_layer

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

recompute everything in every 2nd block  # allow: APL705, as TorchTitan did
optional save everything in every 2nd block where crosses block  # the last block of a bare stack hands nothing on

# Running statistics, counters and caches: read again in the backward, they would already hold the next step's values.
optional save everything in every 2nd block where is mutated
