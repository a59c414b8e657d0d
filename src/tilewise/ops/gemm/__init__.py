"""``alpha * a @ b + beta * c`` and its gradients: one product, described, then run by a backend that supports it."""
