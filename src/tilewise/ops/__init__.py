"""Attention's parts as operators of their own, each with its gradients, and what all operators share: `runtime`."""
