"""`python -m stoker`."""

from stoker.cli.main import run

run()
