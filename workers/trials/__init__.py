"""Engines on trial: what `python -m load formats` measures runs here, in a process of its own."""
