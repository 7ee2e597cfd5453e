"""Functions and classes that several methods share; a method may also be written without them."""
