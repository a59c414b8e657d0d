"""Matrix product and softmax, the parts of attention, as operators with gradients."""
