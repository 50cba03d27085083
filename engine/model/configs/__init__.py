"""Configs of released models: their fields and values are facts (fact sheet, sections 11.1 and A.1)."""
