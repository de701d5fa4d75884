"""Settings for throughput, found by really running them.

Enters: a config with a ready job, a loader of somebody's own, or a bare model. Leaves: settings that
were run, with what they gave. Costs the seconds that each try is granted.

Files: `search.py` which size to try next and which to take, pure; `gauge.py` what memory a try took;
`ranks.py` one answer for all ranks; `bench.py` a ready job measured at any setting; `job.py` the search
over a job's settings; `loaders.py` workers and depth of anybody's DataLoader; `max_batch.py`
`find_max_batch_size`; `tuned_page.py` the page.
"""
