"""`stoker.basics`: the first-principles family of data loading; see `stoker.compat.basics`."""

from stoker.compat.basics import *  # noqa: F403
from stoker.compat.basics import __all__  # noqa: F401
