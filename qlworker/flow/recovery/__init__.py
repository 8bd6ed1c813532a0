"""What a starting worker does with the records it finds, and what happens to settled ones."""
