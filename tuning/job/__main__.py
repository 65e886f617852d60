"""Command line: `python -m tuning.job --trace FILE --model NAME --hardware NAME --prices NAME --out FOLDER`."""

from __future__ import annotations

import sys

from tuning.job.job import main

if __name__ == "__main__":
    sys.exit(main())
