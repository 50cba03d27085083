"""Folders of weights: what a config implies, what a folder holds, reading, and converting."""
