# FSDP's communication behind computation, for any policy: `include <fsdp_overlap>`.
#
# What it does    Gathers the weights of a block in one collective a dtype and group, and starts it before the block before
#                 it computes, in the forward and in the backward; scatters the gradients of a block in one, and awaits them
#                 a block later. It is the plan that people write by hand for SimpleFSDP, and the one that was fastest of
#                 four on Llama-8B there (pytorch#184236).
# What it costs   The weights of two blocks are gathered at once, and the gradients of two are on their way. Sums of
#                 gradients are those without it, up to the order in which a collective adds them; gathers are bitwise.
# Where to put it Anywhere: the order of collectives is planned once values are decided. Where weights are gathered again
#                 in the backward (`include <fsdp_reshard_always>`) those gathers are bucketed and started early as well.
# Not for         a model without blocks, or that is not sharded: every line says so with an error. Not for eager with
#                 FSDP2, which scatters when it likes: there, write the first and the third line yourself.

let weight_gather = all_gather where from parameter

# A gradient is read by nobody once it is scattered: its line of data flow ends at the graph's output. The scatters of
# tensor parallelism are read by what computes next.
let gradient_scatter = reduce_scatter and chain through ((reduce_scatter chain) except (everything feeding everything))

bucket weight_gather per block
# Where it is scattered over two groups, the first scatter is tensor parallelism's, within a host: the copies into a
# bucket take longer there than the bucket gains.
bucket (gradient_scatter except chain before gradient_scatter) per block
prefetch weight_gather 1 block ahead
delay gradient_scatter 1 block
