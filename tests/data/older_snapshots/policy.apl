save first add per block
recompute every 2nd mm or addmm
offload gelu or silu
undecided -> recompute
expect saved per block <= 1 MiB
