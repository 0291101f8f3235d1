"""Lets tests in all folders import the helpers beside this file, such as `traces`."""
