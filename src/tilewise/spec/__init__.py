"""Device-independent description of a call: score terms, derivatives, and which tiles are visited."""
