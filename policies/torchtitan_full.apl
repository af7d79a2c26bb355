# Full activation checkpointing, the decisions of TorchTitan's `FullAC`.
#
# What it does    Keeps what one transformer block hands to the next and recomputes everything else of a block in the
#                 backward. What lies outside the blocks (embedding, final norm, head, loss) is PyTorch's to decide.
# What it saves   All activations inside the blocks: one hidden state a block remains.
# What it costs   Nearly one more forward pass in every step, a third more compute. Korthikanti et al. (arXiv
#                 2205.05198) measure 30 to 40% of the step time for large transformers.
# Use it when     nothing less fits. Try llama3_sac first: it gives back most of that time.
# Not for         models whose forward draws on something other than its inputs and torch's random numbers. Dropout is
#                 recomputed with the mask of the forward; where it should be kept instead, add a last line:
#                 `save random in block`.

policy torchtitan_full

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

recompute everything in block  # allow: APL705, as TorchTitan does
save everything in block where crosses block

# Running statistics, counters and caches: read again in the backward, they would already hold the next step's values.
optional save everything in block where is mutated
