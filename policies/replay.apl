# Repeat the decision of an earlier partition, exactly.
#
# What it does    Saves the values that an earlier partition of the same forward saved, offloads those that it
#                 offloaded, and recomputes all others.
# When you need   A graph that is compiled twice: a parallelizer partitions it and hands the result to torch.compile,
# it              which partitions again and decides anew. Every partition by policylang records on the nodes what it
#                 saved; this policy reads the record. (AutoParallel's save-all partitioner does the same in Python.)
#                 The tags of the model's own `checkpoint`, which come along with the nodes, have been followed or
#                 overridden by then: what was recorded stands, so all lines say `override`.
# What it costs   Nothing beyond what the first decision costs.
# Not for         a first compilation. Where nothing is recorded the `save` line matches nothing, and that is an error:
#                 the record was lost on the way, and a silent "recompute everything" would be the result.

policy replay

override recompute everything
override save everything where recorded saved
optional override offload everything where recorded offloaded
