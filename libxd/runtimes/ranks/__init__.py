"""A world of ranks: an engine that is spread over processes, and one of them, the scorer's child, that is asked."""
