"""Writes a small random model: `python -m load_tests.make_tiny_model --layers 40 --heads 40 --out DIR`."""

import sys

from actors.random_model import main
from kv.exit_status import status_of

if __name__ == "__main__":
    sys.exit(status_of(main))
