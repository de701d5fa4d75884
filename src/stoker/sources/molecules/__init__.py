"""Molecules as small integers.

`files` finds MOLs, `packed` turns them into words and back, `functional_groups` has the 48 flags.
"""
