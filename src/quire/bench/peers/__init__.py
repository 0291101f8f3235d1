"""The systems quire is compared with, measured in an environment of their own."""
