"""Find configs: for a goal, for equal cost, by the paper's sweep."""
