"""What packing will do, told before a run: steps of epochs, budgets tried on lengths, statistics of the data."""
