"""``alpha * a @ b + beta * c`` and its gradients: one product, described, then run by the backend that takes it."""
