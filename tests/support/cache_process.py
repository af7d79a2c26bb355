"""Compilations with Inductor that say what its caches did; run as a program, in a process that has compiled nothing.

``python -m tests.support.cache_process FILE…``: one line of JSON for each file, which holds a :class:`Job`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import policylang
from policylang.backends.caching import code_digest


class Halves(nn.Module):
    """Two graphs, or with ``whole=False`` only the first, which is then the very same graph. Of products alone, which
    take Inductor no C++ compiler."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Parameter(torch.randn(1, 8, 8))
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x @ x.detach()
        if self.whole:
            torch._dynamo.graph_break()
            x = x[None].bmm(self.second)
            x = x.bmm(x.detach())
        return x


class Job(NamedTuple):
    policy: str
    whole: bool = True
    lose_records: bool = False
    """Delete what policylang keeps beside the caches first."""


def compile_and_train(job: Job) -> dict[str, Any]:
    """One step. What AOTAutograd's and Inductor's caches counted, what the report says, or the error's codes."""
    from torch._dynamo.utils import counters
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    torch._dynamo.reset()
    counters.clear()
    if job.lose_records:
        shutil.rmtree(Path(cache_dir()) / "policylang")
    torch.manual_seed(0)
    model = Halves(job.whole)
    backend = policylang.backend(policylang.parse(job.policy))
    errors: list[str] = []
    loss = torch.compile(model, backend=backend)(torch.ones(8, 8)).sum()
    try:
        loss.backward()
    except policylang.PolicyMatchError as error:
        errors = [f"{diagnostic.code}: {diagnostic.message}" for diagnostic in error.diagnostics]
    report = policylang.report(backend)
    return {
        "code": code_digest(), "aot hits": counters["aot_autograd"]["autograd_cache_hit"],
        "aot misses": counters["aot_autograd"]["autograd_cache_miss"],
        "fx hits": counters["inductor"]["fxgraph_cache_hit"], "fx misses": counters["inductor"]["fxgraph_cache_miss"],
        "errors": errors, "from cache": [graph.from_cache for graph in backend.graphs],
        "saved": [list(graph.saved.names) for graph in report.graphs or (report,)],
        "bytes": [graph.saved.bytes for graph in report.graphs or (report,)],
        "lines": [rule.source for rule in report.rules], "matched": [rule.matched for rule in report.rules],
        "gradient": None if model.first.weight.grad is None else model.first.weight.grad.sum().item(),
    }  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(compile_and_train(Job(**json.loads(Path(name).read_text(encoding="utf-8"))))))
