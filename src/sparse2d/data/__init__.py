"""Raw Criteo rows, how they become arrays, and how the arrays become batches."""
