"""Train with TorchTitan's graph trainer, its Llama 3 debugging model, under a policy as its memory policy.

    torchrun --nproc-per-node 2 examples/torchtitan_graph.py                       # with examples/titan_graph.apl
    torchrun --nproc-per-node 2 examples/torchtitan_graph.py torchtitan_default    # with a bundled policy

Needs `torchtitan`, started where its checkout lies: the model's tokenizer and data come from there. The step is one
graph with its gathers in it, which the policy decides about as about everything else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import policylang
from policylang.integrations import torchtitan

POLICY = str(Path(__file__).with_name("titan_graph.apl"))


def configure(policy: str = POLICY, steps: int = 10) -> Any:
    """TorchTitan's own configuration, with the policy among its memory policies."""
    from torchtitan.experiments.graph_trainer.llama3.config_registry import graph_trainer_llama3_debugmodel

    config = graph_trainer_llama3_debugmodel()
    config.training.steps = steps
    config.compile.memory_policy = torchtitan.register(policy)
    return config


def main() -> None:
    trainer = configure(*sys.argv[1:2]).build()
    trainer.train()
    print(policylang.report(trainer._traced_step.gm))
    trainer.close()


if __name__ == "__main__":
    main()
