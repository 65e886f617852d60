"""Writes a small random model: `python -m load_tests.make_tiny_model --layers 40 --heads 40 --out DIR`."""

from actors.random_model import main

if __name__ == "__main__":
    main()
