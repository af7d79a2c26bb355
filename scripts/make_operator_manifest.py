"""Write the operator manifest: the names that ``policylang check`` knows without importing torch.

    python scripts/make_operator_manifest.py

writes ``policylang/language/data/operators.json`` (the names) and beside it ``operator_facts.json`` (what
torch says of them, which the tests hold the groups of the prelude against) from the installed torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch._inductor.compile_fx  # Inductor enters higher-order operators of its own
import torch._inductor.fx_passes.control_dependencies
import torch.distributed._functional_collectives
import torch.distributed.tensor
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen

from policylang.torch_compat.graphs import operator_facts, operator_names

FOLDER = Path(__file__).resolve().parent.parent / "policylang" / "language" / "data"
FORMAT = 1

# Left out: TorchScript's own, test and debugging operators, and the quantized backends; no training graph holds them.
LEFT_OUT = frozenset(
    {
        *("prim", "onnx", "onnx_symbolic", "static_runtime", "export", "profiler"),
        *("_test", "_inductor_test", "_native", "flex_lib", "debugprims", "debug_mode_ops"),
        *(
            "quantized",
            "_quantized",
            "quantized_decomposed",
            "quantization",
            "onednn",
            "mkldnn",
            "mkldnn_prepacked",
            "mkl",
            "sparse",
            "cuda",
        ),
    }
)


def manifest() -> dict[str, object]:
    """Namespace to operator to its overloads; an operator without overloads has the empty string."""
    spaces: dict[str, dict[str, list[str]]] = {}
    for full in operator_names():
        namespace, _, rest = full.partition(".")
        name, _, overload = rest.partition(".")
        if namespace not in LEFT_OUT:
            spaces.setdefault(namespace, {}).setdefault(name, []).extend([overload] if overload else [])
    functional = spaces.get("_c10d_functional", {})
    # The namespace that graphs of older releases hold, and that custom passes still write.
    spaces.setdefault("c10d_functional", {name: list(overloads) for name, overloads in functional.items()})
    operators = {
        namespace: {name: " ".join(overloads) for name, overloads in sorted(names.items())}
        for namespace, names in sorted(spaces.items())
    }
    return {"format": FORMAT, "torch": torch.__version__.partition("+")[0], "operators": operators}


def main() -> None:
    _write("operators.json", manifest())
    _write("operator_facts.json", {"torch": torch.__version__.partition("+")[0], "facts": operator_facts()})


def _write(name: str, content: object) -> None:
    text = json.dumps(content, indent=0, separators=(",", ":")) + "\n"
    (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{name}: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
