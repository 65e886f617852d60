"""Command line: `python -m tuning.job --trace FILE --model NAME --hardware NAME --prices NAME --out FOLDER`."""

from __future__ import annotations

import sys

from kv.exit_status import status_of

if __name__ == "__main__":
    # Here and not above: the pool's processes import this file too, and need next to nothing of the job.
    from tuning.job.job import main

    sys.exit(status_of(main))
