"""What happened to the data: the ledger. Pure Python."""
