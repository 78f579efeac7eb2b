"""``python -m fastcaps`` is the ``fastcaps`` command."""

import sys

from fastcaps.cli import main

sys.exit(main())
