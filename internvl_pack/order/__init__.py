"""Which sample stands where in an epoch: a pure function of (seed, epoch, position)."""
