"""What a batch is and what its loss is, one file a method, behind the small contract of `contract.py`."""
