# A policy that has been through many hands.
policy messy
requires policylang >= 0.2
blocks {layers,h}.*
let big = mm where bytes > 64 MiB and (shape[0] == 8192 or not is view)  #   the large ones

let both = (
    big,
    bmm where (dtype == bf16),  # of attention

    # and of the experts
    aten.{_grouped_mm, _scaled_mm}
) except (
    mm in layers.0
)
recompute everything in block      # the ground rule
save attention in block            # its exceptions
optional save both
recompute every 2nd mm per block   # and an exception to that exception
mm in last block -> must_save

expect saved per block <= 220MiB
expect every (all_gather where from parameter) recomputed
# the end
