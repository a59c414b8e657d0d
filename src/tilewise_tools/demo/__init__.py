"""``tilewise demo``: a pretrained model, a training run and a measurement, each against SDPA."""
