"""``python -m policylang``."""

import sys

from policylang.cli import main

sys.exit(main())
