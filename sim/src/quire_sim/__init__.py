"""Simulation on the real cache: traces, replay, curves, serving. No torch."""
