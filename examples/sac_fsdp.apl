# Selective checkpointing for a sharded model, and FSDP's gathers: one file for eager, compiled and traced training.
policy sac_fsdp

include <llama3_sac>
include <fsdp>  # last: sharding is decided apart from checkpointing
