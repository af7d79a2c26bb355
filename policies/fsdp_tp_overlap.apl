# FSDP's and tensor parallelism's communication behind computation: `include <fsdp_tp_overlap>`.
#
# What it does    What <fsdp_overlap> does, for the weights and gradients alone that FSDP gathers and scatters: one bucket a
#                 block, dtype and group, gathers a block ahead, scatters awaited a block later. What tensor and expert
#                 parallelism send, inside the blocks, is left as it is cut, and started early and awaited late by the time
#                 that everything takes, as far as the data allows.
# What it needs   A device: `device h100-sxm` in your policy, `--device` or `device=`. Its profile is part of what ranks
#                 compare, so all of them need the same one.
# What it costs   The weights of two blocks are gathered at once, and the gradients of two are on their way. What is
#                 moved by time raises the peak by 5% at most.
# Where to put it Anywhere: the order of collectives is planned once values are decided.
# Not for         a model without blocks, or one that is not sharded: every line says so with an error. Where FSDP's is
#                 the only communication the last line has nothing to move, and says so: include <fsdp_overlap> there.
#                 Not for eager.

include <fsdp_overlap>

overlap collective within 5% of peak
