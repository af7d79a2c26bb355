"""The subcommands of ``policylang``. None of them imports torch before its ``run`` needs it.

``arguments(parser)`` declares what a subcommand takes, and ``run(options)`` returns its exit code.
"""
