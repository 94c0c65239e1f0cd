"""The tests of the Engram service."""
