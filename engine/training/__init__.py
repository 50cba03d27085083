"""Training of `nano`, a small DeepSeek-V4.1 model whose mechanisms can be measured: fact sheet section 13."""
