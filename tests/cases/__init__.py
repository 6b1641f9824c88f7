"""What published files and other clients said otherwise, in the words of its class of fault."""
