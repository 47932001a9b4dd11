"""Reports a run as one HTML file with curves and a browser of the completions."""
