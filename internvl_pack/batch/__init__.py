"""From the segments of packs to the tensors of a batch, and what each token of the loss weighs."""
