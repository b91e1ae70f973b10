"""What a model scores on records that it was not trained on, and what it is held against."""
