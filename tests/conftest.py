"""What every test starts from."""

from __future__ import annotations

import torch

# Some kernels add up in another order with several threads, run by run; bitwise comparisons need one order.
torch.set_num_threads(1)
