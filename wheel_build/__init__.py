"""How the wheel is made: setuptools' own, with a list of its dependencies inside, and the same bytes at every build."""
