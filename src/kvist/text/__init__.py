"""Text around the model: tokenizer files, Engram's token map, prompts and replies. Knows no tensors and no torch."""
