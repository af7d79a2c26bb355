"""The subcommands of ``policylang``, one file each.

A subcommand has ``NAME`` and ``SUMMARY``, ``arguments(parser)`` declares what it takes, and ``run(options)`` returns
its exit code. None of them imports torch before ``run`` needs it.
"""
