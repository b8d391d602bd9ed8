"""The `arctic` program. Needs the `cli` extra."""
