"""Resume a run exactly: its position in the data, random generators, and finding its newest checkpoint."""
