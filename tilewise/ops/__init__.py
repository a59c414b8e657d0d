"""Building blocks of attention as operators of their own, each with its gradients."""
