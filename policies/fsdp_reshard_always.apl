# FSDP's reshard-after-forward, for any policy: `include <fsdp_reshard_always>`.
#
# What it does    Drops each gathered weight after its use in the forward and gathers it again in the backward. The
#                 whole line of the gather is recomputed: cast, gather, wait, and everything made of the weight alone
#                 behind it. With a tag on the gather alone, a partitioner keeps the permuted copy of the weight instead
#                 (2.62 GiB on LLaMA-3 8B, found in AutoParallel).
# What it saves   The gathered weights: the full model, in the compute dtype, on every rank.
# What it costs   A second all-gather of every weight in every step.
# Where to put it Last. It is a decision about parallelism and stands whatever the checkpointing above it says: nodes of
#                 these lines lose the tag of the model's own `checkpoint`, nodes elsewhere keep theirs. For some weights
#                 only the other way: `override save fsdp_gather in layers.0` behind it.
# Not for         a model that is not sharded: no gather starts at a parameter there, and the rule says so with an
#                 error. For a file that serves both, write the last line yourself, with `optional` in front.

let fsdp_gather = all_gather where from parameter

# From the parameter to the gather, and behind it whatever is made of the gathered weight alone.
let fsdp_line = chain through fsdp_gather, everything where gathered parameter

override must_recompute fsdp_line
