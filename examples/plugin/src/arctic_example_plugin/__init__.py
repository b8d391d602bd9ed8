"""A plugin for Arctic: one loss and one task."""
