"""Shows a policy in an editor while it is written: a language server over ``api``, without further analysis.

Needs the extra ``lsp``; only ``policylang lsp`` imports it. An answer is a function from a
:class:`~policylang.editor.state.State` to a type of the protocol; ``open_documents.py`` keeps the states up to date;
``server.py`` speaks the protocol and decides nothing.
"""
