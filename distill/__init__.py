"""Making drafters for a target: data that the target writes itself, students, and their training."""
