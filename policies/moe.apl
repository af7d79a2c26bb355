# Routing once, communication once, for any policy of a mixture of experts: `include <moe>` below its rules.
#
# What it does    Keeps which experts each token chose, the order that sorts tokens by expert, and what both all-to-alls
#                 bring: tokens to their experts (dispatch) and results back (combine). A recomputation begins from them.
# Where from      TorchTitan's and Megatron's lists of operators to save, which name the router's choice and the all-to-all.
# What it saves   The time of both all-to-alls in every backward. Recomputed routing may choose other experts where two
#                 scores are close, and an all-to-all whose sizes come from data hangs if ranks disagree: policylang
#                 refuses to recompute it (APL304).
# What it costs   Two tensors of the received tokens a layer: on a stage of four layers of DeepSeek-V3, whose blocks are
#                 recomputed but for these, most of the 5.5 GiB that are saved under `balance up to 2.0`.
# Where to put it Below the rules that recompute. llama3_sac and those of TorchTitan's eager trainer have these lines.
# Not for         a model without experts: every line is optional and matches nothing.

optional save (topk or sort)                  # argsort is a sort in a graph
optional save all_to_all
optional save everything where is mutated     # a counter of tokens would count twice
