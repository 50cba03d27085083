"""The paged KV cache: which block belongs to whom (pure), and the tensors behind it."""
