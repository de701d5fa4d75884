"""The mass-spectrum recipes: a fingerprint student and a graph teacher that predict EI spectra."""
