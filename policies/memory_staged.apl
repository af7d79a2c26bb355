# Recomputation in stages: save where the least is alive, every 2 GiB, and recompute everything between.
#
# What it does    Cuts the forward into stages that make about 2 GiB of values each, and keeps what is alive at the cuts.
#                 A cut lies where a stage has the least to hand on: between two blocks of a transformer, usually, or
#                 wherever another model is narrow. The backward recomputes one stage at a time.
# Where from      AutoParallel marks values to save so that a chain of recomputation does not grow beyond some GiB.
# What it saves   All activations but what crosses the cuts; no block has to be named, no operator known.
# What it costs   Nearly one more forward pass in every step, as torchtitan_full does, matmuls and attention included.
# The dial        The size. A stage is recomputed as a whole, so its values are alive together: memory is about one stage
#                 plus what crosses all the cuts. Small stages have many cuts. Look at the report, halve it, look again.
#                 `per auto` is as many stages as each has GiB, AutoParallel's default.
# Use it for      models without regular blocks (U-Nets, encoders with decoders), and to bound the peak of recomputation
#                 under a policy of your own: put its second rule at the end of your file.
# Not for         a model whose whole forward makes less than the size: it has no cut, and all of it is recomputed. For
#                 transformers try llama3_sac first.
# With FSDP       as it is: a gathered weight is made of a parameter alone, so it crosses no cut and is gathered again.
# On a mesh       under torch.compile, give every rank the same batch sizes: where the cuts lie follows them (APL611).

policy memory_staged

recompute everything  # allow: APL701, APL705, stages and not blocks are recomputed one at a time
optional save everything where crosses cut per 2 GiB    # a forward that makes less has no cut

optional save topk                                      # MoE: recomputed routing may route differently

# Running statistics, counters and caches: read again in the backward, they would already hold the next step's values.
optional save everything where is mutated
