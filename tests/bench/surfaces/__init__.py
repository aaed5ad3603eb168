"""Further surfaces for the simulated night, beside the product's own: other optima, noise, interactions and differences between types."""
