"""How workers keep step: five parts, the named systems made of them, and their text form."""
