"""Tangents (JVP) of o and the LSE in one kernel."""
