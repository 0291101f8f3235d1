"""The commands of traces and simulations: one file each, found by entry points."""
