"""Statistics behind the detectors: pure functions, arrays in and arrays out."""
