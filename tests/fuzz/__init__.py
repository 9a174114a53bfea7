"""Structure-aware fuzzing: sound captures in, damaged ones out, and what must hold for each of them."""
