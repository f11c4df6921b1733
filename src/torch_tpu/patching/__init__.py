"""The registry of changes to other people's objects: what each is for, what it relies on, and whether it was made."""
