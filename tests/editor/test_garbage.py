"""The collector runs when nobody types, once, and not before."""

from __future__ import annotations

import asyncio
import gc

from policylang.editor import garbage


def test_it_collects_once_after_changes_when_it_is_quiet(monkeypatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(garbage, "_REST", 0.01)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    changes, quiet = 0, False

    async def test() -> None:
        nonlocal changes, quiet
        task = asyncio.ensure_future(garbage.collect_when_quiet(lambda: changes, lambda: quiet))
        await asyncio.sleep(0.1)
        assert not collected, "nothing changed"
        changes = 1
        await asyncio.sleep(0.1)
        assert not collected, "something is under way"
        quiet = True
        await asyncio.sleep(0.2)
        assert len(collected) == 1
        monkeypatch.setattr(garbage, "_MUCH", -1)
        quiet = False
        await asyncio.sleep(0.1)
        assert len(collected) > 1, "very much has come together"
        task.cancel()

    asyncio.run(test())
