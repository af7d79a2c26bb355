"""What Inductor's caches know a pass or a partitioner by: a key, in place of its pickle."""

from __future__ import annotations


class KeyedForCaches:
    """Stands under ``_key``, which has to cover all that its work depends on."""

    _key: str

    def uuid(self) -> str:
        """Stands for it in the keys of Inductor's caches."""
        return self._key

    def __getstate__(self) -> dict[str, str]:
        # Inductor hashes the pickle beside the uuid, and a policy's tree holds comments and line numbers, which decide
        # nothing. Such a pickle is only ever made for a key: the work is done in the process that traced the graph.
        return {"_key": self._key}
