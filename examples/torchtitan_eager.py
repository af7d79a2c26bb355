"""Train with TorchTitan's eager trainer, its Llama 3 debugging model, under a policy in its activation checkpoints.

    torchrun --nproc-per-node 2 examples/torchtitan_eager.py                # with examples/sac_fsdp.apl
    torchrun --nproc-per-node 2 examples/torchtitan_eager.py llama3_sac     # with a bundled policy

Needs `torchtitan` and the triton that it imports, started where its checkout lies: the model's tokenizer and data come
from there. TorchTitan shards the model with FSDP2 over all ranks, after the checkpoints are in place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import policylang
from policylang.integrations.torchtitan_eager import PolicyAC

POLICY = str(Path(__file__).with_name("sac_fsdp.apl"))


def configure(policy: str = POLICY, steps: int = 10) -> Any:
    """TorchTitan's own configuration, with the policy in the place of its activation checkpointing."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.training.steps = steps
    config.activation_checkpoint = PolicyAC.Config(policy=policy)
    return config


def main() -> None:
    trainer = configure(*sys.argv[1:2]).build()
    trainer.train()
    print(policylang.report(trainer.model_parts[0]))
    trainer.close()


if __name__ == "__main__":
    main()
