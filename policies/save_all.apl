# Keep everything the backward reads, recompute nothing.
#
# What it does    What eager PyTorch does: every value that the backward needs is kept from the forward. Inside
#                 torch.compile that is *not* the default, where min-cut recomputes what is cheap.
# What it saves   Time in the backward, and nothing else; it has the highest peak memory of all policies.
# Use it as       the baseline that another policy's memory and speed are compared with, or to find out whether a
#                 numerical difference comes from recomputation: under this policy there is none.
# Not for         training in earnest.

policy save_all

save everything
