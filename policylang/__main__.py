"""``python -m policylang``, and the installed script."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C while it is imported ends it without a traceback, as later."""
    try:
        from policylang.commands.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
