"""stoker inside other training frameworks: a Loader in their loops, their runs in our reports.

One module or family per framework; each raises if its package is missing. They share `adapted.py`. Importing
this room loads none of them.
"""
