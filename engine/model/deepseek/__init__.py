"""DeepSeek-V4.1's text model: one mechanism a file, named after the fact sheet's sections."""
