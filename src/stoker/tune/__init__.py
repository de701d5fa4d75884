"""Settings for throughput, found by really running them.

Enters: a config with a ready job, a loader of somebody's own, or a bare model. Leaves: settings that were run, with
what they gave. Costs the seconds that each try is granted.
"""
