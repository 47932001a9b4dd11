"""A run as one HTML file: curves, and a browser of what the policy wrote."""
