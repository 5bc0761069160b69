"""What a network costs: exchanges, codecs and runs between hosts that are namespaces here."""
