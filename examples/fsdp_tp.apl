# The policy of examples/train_fsdp_tp.py: selective checkpointing under tensor parallelism, and FSDP's gathers.
policy fsdp_tp

blocks layers.*

let residual = add where inputs == 2 and ndim == 3          # not the epsilon of a norm, which has one input

recompute everything in block
save attention in block
save matmul in block
recompute every 2nd mm per block
save first residual per block
save everything in block where crosses block
optional save reduce_scatter in block                       # tensor parallelism: do not communicate twice

include <fsdp_reshard_always>                               # last: sharding is decided apart from checkpointing

expect every (all_gather where from parameter) recomputed
