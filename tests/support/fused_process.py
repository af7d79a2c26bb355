"""A step of a sharded model under Inductor and a policy that fuses; run as a program, in a process that is new.

``python -m tests.support.fused_process POLICY``: one line of JSON.
"""

import json
import sys
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import policylang
from policylang.backends.caching import code_digest
from policylang.torch_compat import distributed
from tests.support.lines import NAMES, Layers, placements_of
from tests.support.sharded import fake_ranks

MESH = [[0, 2, 4, 6], [1, 3, 5, 7]]
"""Not counted row by row: the default group has the same ranks in another order, and does not serve."""


def compile_and_train(text: str, gradients: bool = True) -> dict[str, Any]:
    """On rank 0 of eight pretended ones. The process groups there are afterwards, and what the report says. Without
    ``gradients``, an evaluation."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with fake_ranks(8), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = DeviceMesh("cpu", torch.tensor(MESH), mesh_dim_names=NAMES[:2])
        model = Layers(mesh, placements_of(2, "one"))
        backend = policylang.backend(policylang.parse(text))
        with torch.set_grad_enabled(gradients):
            loss = torch.compile(model, backend=backend)(torch.ones(2, 16)).sum()
        if gradients:
            loss.backward()
        made = [known for known in distributed.known_groups() if known.name.startswith("policylang_")]
    report = policylang.report(backend)
    found = {
        "code": code_digest(),
        "from cache": [graph.from_cache for graph in backend.graphs],
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "made": sorted([known.name, list(known.ranks)] for known in made),
        "rewrites": [str(rewrite) for rewrite in report.rewrites],
        "saved": report.saved.bytes if report.saved else None,
    }
    torch._dynamo.reset()
    return found


if __name__ == "__main__":
    print(json.dumps(compile_and_train(sys.argv[1])))
