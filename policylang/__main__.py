"""``python -m policylang``."""

import sys

from policylang.commands.cli import main

sys.exit(main())
