"""From a checkpoint to a GGUF that is proved to be the model that was trained."""
