"""``python -m fastcaps_lab`` is the ``fastcaps`` command."""

import sys

from fastcaps_lab.cli import main

sys.exit(main())
