"""What is saved, who writes it, and when it is committed."""
