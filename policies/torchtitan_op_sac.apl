# Selective checkpointing by operator, the decisions of TorchTitan's `SelectiveAC`, line by line.
#
# What it does    In every block: keeps what is expensive to recompute (every second matmul, attention, collectives,
#                 routing decisions) and recomputes the rest. Outside the blocks PyTorch decides.
# What it saves   Everything between the matmuls: norms, activations, rotary embeddings, casts, and half of the matmuls.
# What it costs   Half of the matmul FLOPs of the blocks' forward once more, and pointwise work, which is bound by
#                 memory bandwidth and partly hidden. TorchTitan's Llama 8B on FSDP 4 × TP 2 went from 49.65 to 28.54 GiB
#                 for 8.5% fewer tokens a second (torchtitan#2570).
# How faithful    Compared with TorchTitan 0.3.0 node by node on Llama, Qwen3, Mixtral, GPT-2 and BART: one difference, the
#                 CPU's attention kernel, which its list lacks and this one keeps.
# Use it when     you want the same decisions as TorchTitan's eager selective checkpointing, under torch.compile.
# Not for         a first try on another model: llama3_sac says the same in fewer lines, also counts matmuls with a bias,
#                 and keeps the attention residual.
#
# Nearly every line is optional because TorchTitan's list is one list for all models: no model has all of it.

policy torchtitan_op_sac

blocks {layers,layer,h,block,blocks,stages,transformer_blocks,single_transformer_blocks,down_blocks,up_blocks}.*

# TorchTitan counts mm and linear: its products with a weight. The same product is a bmm of one matrix in a graph where
# an einsum was taken apart, and an einsum where it was not.
let product = mm, aten.linear, bmm where shape[0] == 1, aten.einsum where ndim <= 3

# TorchTitan leaves the MoE router's matmul out of the count and always recomputes it; it knows the router by the shape
# of its weight, this policy by its name.
let counted = product outside moe.router.gate

recompute everything in block
optional save compute in block
optional save attention in block
optional save (aten.linear or aten.einsum) in block
optional save (reduce_scatter or all_to_all) in block
optional save topk in block                              # recomputed routing may route differently
optional save aten.max.default in block                  # the scales of low-precision matmuls
optional recompute every 2nd counted per block
optional recompute product in moe.router.gate

# A copy from the GPU to the host stalls the device: never twice. (MoE reads its all-to-all sizes this way.)
optional save (cast where device == cpu) fed by (everything where device == cuda*)

save everything in block where crosses block
optional save everything in block where is mutated
