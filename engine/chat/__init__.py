"""Text to tokens and back: tokenizer, chat template, incremental detokeniser. Imports no torch."""
