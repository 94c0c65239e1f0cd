"""The Engram library: hash, tables, projection, gate and sessions; no HTTP."""
