"""Matrix product ``alpha * a @ b + beta * c`` and its gradients: description, choice of backend, kernels."""
