"""What a diagnosis looks like to a reader."""
