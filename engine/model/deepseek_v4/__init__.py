"""DeepSeek-V4: CSA and HCA over the mechanisms of engine.model.deepseek."""
