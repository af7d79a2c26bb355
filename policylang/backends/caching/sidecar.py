"""The cache sidecar: a file beside Inductor's caches with what was decided for a graph, read when the graph is a hit.

On a cache hit no partitioner runs, so there would be no plan to check and nothing to report. A sidecar is a small JSON
file named by :func:`~policylang.backends.caching.fingerprint.sidecar_key`. Losing one costs a compilation, never an
answer.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from policylang.torch_compat import compilers

FORMAT = 1


def write(key: str, content: dict[str, Any]) -> bool:
    """Store a sidecar; False where the folder does not take it (read-only, full)."""
    text = json.dumps({"format": FORMAT, "key": key, "content": content}, separators=(",", ":"), sort_keys=True)
    path = _path(key)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{key[:8]}-", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)  # readers see the old file or the new one, never half of one
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def read(key: str) -> dict[str, Any] | None:
    """What was stored, or None where there is none that can be read and is about this graph."""
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("key") != key:
        return None
    content = found.get("content")
    return content if isinstance(content, dict) else None


def _path(key: str) -> Path:
    """Spread over folders, as the caches beside it are."""
    return Path(compilers.inductor_cache_folder()) / "policylang" / key[:2] / f"{key}.json"
