"""The core as it was, for `lockstep`."""
