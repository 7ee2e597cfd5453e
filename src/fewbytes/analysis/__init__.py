"""What finished runs tell further: what a model knows at each depth, what an upload gives away."""
