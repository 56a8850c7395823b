"""Tasks: problems and the judges of their answers."""
