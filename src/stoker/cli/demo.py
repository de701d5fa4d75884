"""`stoker demo`: placeholder until bars land."""


def demo() -> None:
    """Show what stoker does, on data it makes."""
