"""Doors for other libraries: each turns their layer into ours, and imports them only when asked."""
