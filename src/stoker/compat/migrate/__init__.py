"""The documents' YAML files in today's layout: `convert.py` with its tables of names, values and text."""
