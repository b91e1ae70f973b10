"""The recipe: strict YAML checked by one schema, with every value's origin."""
