"""What sits on modules and parameters and adds to the sums of the slots."""
