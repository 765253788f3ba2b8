"""`python -m looseleaf` is the command line."""

import sys

from looseleaf.cli import main

sys.exit(main())
