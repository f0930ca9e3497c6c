"""What README's numbers come from; each script says what it measures and prints where it ran."""
