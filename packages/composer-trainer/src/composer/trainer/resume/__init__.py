"""The position of a run in its data, and its random generators.

`composer.checkpoint.resume` tells how a run is resumed.
"""
