"""A document whose rules are weighed, as a test waits for it: the server weighs them when nobody asks for anything."""

from __future__ import annotations

from contextlib import suppress

from policylang.editor.open_documents import OpenDocuments
from policylang.editor.state import State
from policylang.language.cancellation import Cancelled


async def weighed(documents: OpenDocuments, uri: str) -> State | None:
    """The state of the text as it is, with the worth of each rule, worked out in the worker."""
    while (state := await documents.settled(uri)) is not None:
        with suppress(Cancelled):
            if state.graph is not None:
                await documents.in_worker(state.graph.weigh, state)
            break
    return state
