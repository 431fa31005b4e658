"""Linear attention for TPUs."""
