"""Tables of recorded runs, each row with its provenance label and the fingerprints behind it; imports no torch."""
