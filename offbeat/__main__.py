"""`python -m offbeat`: the command line where the `offbeat` script is not on the path."""

import sys

from offbeat.cli import main

sys.exit(main())
