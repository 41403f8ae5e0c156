"""What users subclass, and what is done to it before it trains: hooks found, layers materialised, compiled."""
