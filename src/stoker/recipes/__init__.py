"""Ready jobs: forex, massspec, segmentation, tabular; each has a page in docs/recipes/."""
