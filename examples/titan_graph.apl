# The policy of examples/torchtitan_graph.py: TorchTitan's own default, and FSDP's gathers as a line.
policy titan_graph

include <torchtitan_default>
include <fsdp>  # last: every weight is gathered again in the backward, the head's too
