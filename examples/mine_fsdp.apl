# mine.apl on a sharded model: weights are gathered again in the backward.
policy mine_fsdp

include "mine.apl"
include <fsdp>                          # last: sharding is decided apart from checkpointing
