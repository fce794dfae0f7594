"""What is known of samples before they are packed: tokens, tiles, where they may be cut, or why they cannot be used."""
