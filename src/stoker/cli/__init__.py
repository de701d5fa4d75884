"""One file per verb: parse, call, print. Nothing imports this package."""
