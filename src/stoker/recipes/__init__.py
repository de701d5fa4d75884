"""Ready jobs, one folder each with a page in docs/recipes/, and what every job needs."""
