"""From records to packed text: strict reading, exact de-duplication, the split by group, and token shards."""
