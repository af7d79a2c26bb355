# FSDP's reshard-after-forward under its short name: `include <fsdp>`.
#
# What it does    What `fsdp_reshard_always` does: gathers each weight again in the backward.
# What it costs   A second all-gather of every weight in every step; `fsdp_reshard_never` is the other choice.
# Not for         a model that is not sharded.

include <fsdp_reshard_always>
