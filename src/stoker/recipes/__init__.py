"""Ready-made training jobs, each with a folder here and a page in docs/recipes/, and the code that they share."""
