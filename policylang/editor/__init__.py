"""What an editor shows of a policy while it is written: a language server over ``api``, with no analysis of its own.

Needs the extra ``lsp``; only ``policylang lsp`` imports this room. ``features/`` has a module an answer,
each a function from a :class:`~policylang.editor.state.State` to what the protocol wants; ``open_documents.py``
keeps their states up to date; ``server.py`` speaks the protocol and decides nothing.
"""
