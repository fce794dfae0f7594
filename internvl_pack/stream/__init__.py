"""From the plan's steps to batches: readers encode and decode their packs, the loader hands them out in order."""
