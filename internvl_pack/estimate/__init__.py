"""What packing will do, estimated before a run: steps of epochs, budgets tried on lengths, statistics of the data."""
