"""What is computed, independent of any device: terms, their derivatives, and which tiles they leave to compute."""
