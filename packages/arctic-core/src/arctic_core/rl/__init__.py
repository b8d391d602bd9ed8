"""The training loop behind `arctic train`: job files, tasks, the loop itself, and its reports."""
