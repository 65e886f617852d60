"""The command line of moves: `python -m migrate.ctl --help`."""
