# The policy that the tutorial arrives at.
policy mine

recompute everything in block
save attention in block
save matmul in block
recompute every 2nd mm per block
save everything in block where crosses block

expect recomputed flops <= 40%
