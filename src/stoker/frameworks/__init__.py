"""stoker inside the frameworks people already use: a Loader in their loops, their runs in our reports.

One file per framework; each needs its package and says so. `adapted.py` is what they share. Importing this
room loads none of them.
"""
