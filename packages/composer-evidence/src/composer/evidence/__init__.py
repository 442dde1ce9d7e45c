"""Evidence: which training methods pay on a task."""
