# FSDP without reshard-after-forward, for any policy: `include <fsdp_reshard_never>`.
#
# What it does    Keeps each gathered weight from its use in the forward until its use in the backward. Of the line
#                 cast → gather → wait → views, one value is saved: the last that is no view. The views behind it are
#                 looked at again and cost nothing; what lies before it is not kept beside it.
# Where from      ZeRO-2, in FSDP's words `reshard_after_forward=False`.
# What it saves   The second all-gather of every weight in every step.
# What it costs   The gathered weights: the full model, in the compute dtype, on every rank.
# Where to put it Last. It is a decision about parallelism and stands whatever the checkpointing above it says: nodes of
#                 these lines lose the tag of the model's own `checkpoint`, nodes elsewhere keep theirs. To gather the
#                 weights of some modules again: `override must_recompute fsdp_line in layers.*` behind it.
# Not for         a model that is not sharded (the rule says so with an error), or one whose weights do not fit a device.

let fsdp_gather = all_gather where from parameter

# From the parameter to the gather, and behind it whatever is made of the gathered weight alone.
let fsdp_line = chain through fsdp_gather, everything where gathered parameter

let fsdp_weight = last (fsdp_gather chain where not is view) per chain

override save fsdp_weight
optional override must_recompute fsdp_line except (fsdp_weight, fsdp_gather feeding fsdp_weight)
