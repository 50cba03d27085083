"""The static program in C and its build."""
