# FSDP's and tensor parallelism's communication behind computation: `include <fsdp_tp_overlap>`.
#
# What it does    What <fsdp_overlap> does, for the weights and gradients alone that FSDP gathers and scatters: one bucket a
#                 block, dtype and group, gathers a block ahead, scatters awaited a block later. What tensor and expert
#                 parallelism send, inside the blocks, is left as it is cut, and started early and awaited late by the time
#                 that everything takes, as far as the data allows.
# What it needs   A device: `device h100-sxm` in your policy, `--device` or `device=`. Its profile is part of what ranks
#                 compare, so all of them need the same one.
# What it costs   The weights of two blocks are gathered at once, and the gradients of two are on their way. Moving what is
#                 left by time raises the peak by no more than 5% above that of the order as traced: where the gathers
#                 ahead have used that up, as on a model of a few megabytes, it stays where it is.
# Where to put it Anywhere: the order of collectives is planned once values are decided.
# Not for         a model without blocks, or one that is not sharded: its lines say so with an error. Where FSDP's is the
#                 only communication <fsdp_overlap> says as much, and takes no device. Not for eager.

include <fsdp_overlap>

optional overlap collective within 5% of peak
