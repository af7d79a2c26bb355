"""What an editor shows of a policy while it is written: a language server over ``api``, with no analysis of its own.

Needs the extra ``lsp``; only ``policylang lsp`` imports this room. An answer is a function from a
:class:`~policylang.editor.state.State` to what the protocol wants; ``open_documents.py`` keeps the states up to date;
``server.py`` speaks the protocol and decides nothing.
"""
