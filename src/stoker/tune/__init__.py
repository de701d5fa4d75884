"""Settings for throughput, found by really running them.

Enters: a config with a ready job, a loader of somebody's own, or a bare model. Leaves: settings that
were run, with what they gave. Costs the seconds that each try is granted.

Files: `trial.py` a ready job measured at any setting; `job.py` the search over a job's settings; `loaders.py`
workers and depth of anybody's DataLoader; `tuned_page.py` the page. Running
and timing a job, its memory and the search for a size are in `stoker.measure`.
"""
